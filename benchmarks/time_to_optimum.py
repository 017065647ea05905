"""Seconds until the deterministic policy earns 90 % of the optimum of the `regime` market out of sample.

`python -m benchmarks.time_to_optimum` trains ours with its preset and RecurrentPPO with the same rollouts, epochs,
batches and rates, and looks at both every few rollouts on a draw of the market that no training sees. The clocks stand
still while it looks. Each seed is a process of its own on one thread.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.oracles import make_recurrent_ppo, varied
from benchmarks.results import markdown_table, parser_of, publish
from tailguard.env import score
from tailguard.presets import Preset, regime

MODULE = "benchmarks.time_to_optimum"
UNSEEN = 1_000_000  # seeds of markets that no training uses


@dataclass
class Reached:
    """Where a run stood when it stopped: at the goal, or out of budget."""

    seed: int
    steps: int = 0
    fraction: float = 0.0
    wall: float = 0.0
    cpu: float = 0.0

    def cells(self, who: str, goal: float) -> list[str]:
        done = "reached" if self.fraction >= goal else "not reached"
        figures = [f"{self.steps:,}", f"{self.wall:.1f}", f"{self.cpu:.1f}", f"{self.fraction:.3f}", done]
        return [who, str(self.seed), *figures]


class Watch(BaseCallback):
    """Looks every few rollouts and stops at the goal; time spent looking is not counted."""

    def __init__(self, chosen: Preset, found: Reached, goal: float, every: int) -> None:
        super().__init__()
        self.chosen, self.found, self.goal, self.every = chosen, found, goal, every
        self.rollouts, self.began = 0, (time.perf_counter(), time.process_time())

    def _on_rollout_start(self) -> None:
        """Before a rollout the last update is through."""
        self.rollouts += 1
        if self.rollouts > 1 and (self.rollouts - 1) % self.every == 0:
            self.look()

    def look(self) -> None:
        now = time.perf_counter(), time.process_time()
        self.found.wall += now[0] - self.began[0]
        self.found.cpu += now[1] - self.began[1]
        self.found.steps = self.model.num_timesteps
        held_out = score(self.chosen.market, self.model, seed=UNSEEN + self.found.seed)  # type: ignore[arg-type]
        self.found.fraction = held_out.fraction
        self.began = time.perf_counter(), time.process_time()

    def _on_step(self) -> bool:
        return self.found.fraction < self.goal


class StopAfter(BaseCallback):
    """Ends a run at its budget of steps, without changing the schedules of the whole training."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def _on_step(self) -> bool:
        return self.model.num_timesteps <= self.steps


def make(who: str, chosen: Preset, seed: int) -> Any:
    return chosen.agent(seed) if who == "ours" else make_recurrent_ppo(chosen, seed)


def run(who: str, seed: int, steps: int, goal: float, every: int) -> Reached:
    """One seed of one learner; the rate falls as in the preset's whole training, whenever it stops."""
    chosen, found = varied(regime(), {"update_threads": 1}, None), Reached(seed)
    make(who, chosen, seed).learn(2 * chosen.n_envs * chosen.config.n_steps)  # compiled loops and the allocator
    model = make(who, chosen, seed)
    watch = Watch(chosen, found, goal, every)
    budget = StopAfter(steps)
    model.learn(chosen.total_timesteps, callback=[watch, budget])
    return found


def all_seeds(who: str, seeds: int, steps: int, args: argparse.Namespace) -> list[Reached]:
    found = []
    for seed in range(seeds):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found.append(pool.submit(run, who, seed, steps, args.goal, args.every).result())
        print(who, asdict(found[-1]), flush=True)
    return found


def verdict(ours: list[Reached], peers: list[Reached], goal: float) -> str:
    """Ratios of medians; a lower bound where the peer ran out of budget."""
    if not all(run.fraction >= goal for run in ours):
        return "Ours did not reach the goal with every seed."
    bound = "" if all(run.fraction >= goal for run in peers) else "at least "
    wall, cpu = (median(getattr(r, k) for r in peers) / median(getattr(r, k) for r in ours) for k in ("wall", "cpu"))
    return f"RecurrentPPO takes {bound}**{wall:.1f}** times our wall time and {bound}**{cpu:.1f}** times our CPU time."


def arguments() -> argparse.Namespace:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--goal", type=float, default=0.9, help="fraction of the optimum (default 0.9)")
    parser.add_argument("--seeds", type=int, default=3, help="of ours (default 3)")
    parser.add_argument("--peer-seeds", type=int, default=1, help="of RecurrentPPO (default 1)")
    parser.add_argument("--steps", type=int, default=800_000, help="budget of ours (default 800,000)")
    parser.add_argument("--peer-steps", type=int, default=800_000, help="budget of RecurrentPPO (default 800,000)")
    parser.add_argument("--every", type=int, default=2, help="rollouts between two looks (default 2)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ours = all_seeds("ours", args.seeds, args.steps, args)
    peers = all_seeds("RecurrentPPO", args.peer_seeds, args.peer_steps, args)
    rows = [found.cells("ours", args.goal) for found in ours]
    rows += [found.cells("RecurrentPPO", args.goal) for found in peers]
    rollouts = f"{args.every} rollouts of {64 * 128:,} steps"
    body = "\n\n".join(
        [
            f"Until the deterministic policy earns {args.goal:.0%} of the optimum on 128,000 unseen bars, looked at "
            f"every {rollouts}; looking is not counted. One thread, preset `regime`; RecurrentPPO has the same "
            f"rollouts, epochs, batches and rates, and a budget of {args.peer_steps:,} steps.",
            markdown_table(["learner", "seed", "steps", "seconds", "CPU seconds", "fraction then", "goal"], rows),
            verdict(ours, peers, args.goal),
        ]
    )
    publish("time-to-optimum", "Time to 90 % of the optimum on regime", MODULE, body, args.dry)


if __name__ == "__main__":
    main()
