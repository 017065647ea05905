"""Environment steps per second of collecting alone: environments, normalization, acting, judging, on one thread.

`python -m benchmarks.rollout_speed` collects rollouts of TradingVecEnv inside SB3's VecNormalize with updates left out.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.peers.cases import Case, make_env
from benchmarks.peers.learners import ours
from benchmarks.peers.measure import CLOCKS, Clock
from benchmarks.results import markdown_table, parser_of, publish
from tailguard import DistributionalPPO
from tailguard.rollout.collect import Judges

MODULE = "benchmarks.rollout_speed"
STAGES = ("environment", "judging", "rollout")


class Nothing(BaseCallback):
    def _on_step(self) -> bool:
        return True


def prepared(case: Case, normalized: bool) -> tuple[DistributionalPPO, BaseCallback]:
    env: VecEnv = make_env(case)
    agent = ours.make(case, VecNormalize(env, norm_reward=False) if normalized else env, case.peer_work(), 1)
    return agent, agent._setup_learn(10**9, Nothing())[1]


def collect(agent: DistributionalPPO, callback: BaseCallback) -> None:
    assert agent.env is not None
    agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.config.n_steps)


def stepping_alone(agent: DistributionalPPO, n_steps: int = 1_000) -> float:
    """CPU seconds of one step of all environments, with nothing else between two steps; the best of three."""
    env = agent.env
    assert env is not None
    actions = np.zeros((env.num_envs, *env.action_space.shape), np.float32)
    times = []
    for _ in range(3):
        began = time.process_time()
        for _ in range(n_steps):
            env.step(actions)
        times.append((time.process_time() - began) / n_steps)
    return min(times)


def measure(case: Case, normalized: bool, seconds: float) -> list[str]:
    """A row: steps per second by both clocks, the best of the rollouts, and the shares of the CPU time."""
    agent, callback = prepared(case, normalized)
    collect(agent, callback)
    alone = stepping_alone(agent)
    clock, spent = Clock(), []
    speak = Judges.speak
    clock.wrap(agent.env, "step", "environment")
    clock.wrap(Judges, "speak", "judging")
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(spent) < 3:
        began = {kind: now() for kind, now in CLOCKS.items()}
        with clock.running("rollout"):
            collect(agent, callback)
        spent.append({kind: now() - began[kind] for kind, now in CLOCKS.items()})
    Judges.speak = speak  # type: ignore[method-assign]
    env, judged, total = (clock.of(stage, "cpu") for stage in STAGES)
    fastest = {kind: min(s[kind] for s in spent) for kind in CLOCKS}
    shares = [alone * case.n_steps / fastest["cpu"], env / total, (total - env - judged) / total, judged / total]
    speeds = [f"{case.rollout / fastest[kind]:,.0f}" for kind in CLOCKS]
    return [str(size) for size in case.sizes] + ["yes" if normalized else "no", *speeds, *(f"{s:.0%}" for s in shares)]


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="time per row (default 3)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(hidden, n_envs, 128) for hidden in (64, 256) for n_envs in (8, 64)]
    rows = [measure(Case("trading", *size), norm, args.seconds) for size in sizes for norm in (False, True)]
    shares = ["stepping alone", "environment", "acting", "judging"]
    header = ["hidden", "envs", "n_steps", "VecNormalize", "steps/s", "steps/CPU s", *shares]
    body = (
        "The `regime` market, one thread, no updates; the best rollout of each row. Stepping alone: one step of all "
        "environments in a loop of their own, over a rollout step. The other shares are timed within rollouts, where "
        "the environments find cold caches, ended episodes and two clocks."
    )
    body = f"{body}\n\n{markdown_table(header, rows)}"
    publish("rollout-speed", "Speed of collecting", MODULE, body, args.dry)


if __name__ == "__main__":
    main()
