"""Does torch.compile pay on a CPU? For the policies that compiled loops do not know: GRU, and no memory at all.

`python -m benchmarks.torch_compile` times whole updates with the layers of actor and critics as they are, and through
torch.compile (which needs a C++ compiler), in turns, on one thread.
"""

from __future__ import annotations

import shutil
import time
from statistics import median
from typing import Any

import torch

from benchmarks.peers.cases import Case, make_env
from benchmarks.peers.measure import Clock
from benchmarks.results import markdown_table, parser_of, publish
from tailguard import DistributionalPPO

MODULE = "benchmarks.torch_compile"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRU": ("MlpLstmPolicy", {"memory": "gru"}),
    "no memory": ("MlpPolicy", {}),
}
N_WARM, N_ENVS, N_STEPS = 3, 64, 128


def agent_of(policy: str, hidden: int) -> DistributionalPPO:
    """The learner of benchmarks.peers with another policy."""
    name, settings = POLICIES[policy]
    sizes = {} if name == "MlpPolicy" else {"lstm_hidden_size": hidden}
    return DistributionalPPO(
        name,
        make_env(Case("trading", hidden, N_ENVS, N_STEPS)),
        n_steps=N_STEPS,
        n_epochs=4,
        batch_size=1_024,
        sequence_length=32,
        critic={"n_quantiles": 32},
        policy_kwargs={**settings, **sizes, "net_arch": [hidden, hidden] if name == "MlpPolicy" else [64, 64]},
        optimizer="adaptive_upgd",
        update_threads=1,
        torch_threads=1,
        seed=0,
    )


def compile_what_can_be(agent: DistributionalPPO) -> None:
    """The layers of every trunk: memories and quantile losses have kernels of their own."""
    for trunk in (agent.policy.actor, *(critic.trunk for critic in agent.policy.critic_list)):
        trunk.layers.compile()
    agent.policy.action_head.last_layer.compile()


def seconds_of_an_update(agent: DistributionalPPO) -> float:
    """CPU seconds of `train` on a fresh rollout."""
    clock = Clock()
    train = agent.train
    clock.wrap(agent, "train", "update")
    agent.learn(N_ENVS * N_STEPS, reset_num_timesteps=False)
    agent.train = train  # type: ignore[method-assign]
    return clock.of("update", "cpu")


def measure(policy: str, hidden: int, repeats: int) -> list[str]:
    """A row: milliseconds of an update both ways, their ratio, and seconds until the first compiled update was over."""
    plain, compiled = agent_of(policy, hidden), agent_of(policy, hidden)
    compile_what_can_be(compiled)
    began = time.perf_counter()
    seconds_of_an_update(compiled)
    first = time.perf_counter() - began
    for agent in (compiled, plain) * N_WARM:
        seconds_of_an_update(agent)
    times = [(seconds_of_an_update(plain), seconds_of_an_update(compiled)) for _ in range(repeats)]
    eager, fused = (median(column) for column in zip(*times, strict=True))
    ratio = median(a / b for a, b in times)
    return [policy, str(hidden), f"{1e3 * eager:.0f}", f"{1e3 * fused:.0f}", f"{ratio:.2f}", f"{first:.0f}"]


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--repeats", type=int, default=7, help="updates each way (default 7)")
    args = parser.parse_args()
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise SystemExit("torch.compile needs a C++ compiler, and there is none here.")
    torch.set_num_threads(1)
    rows = [measure(policy, hidden, args.repeats) for policy in POLICIES for hidden in (64, 256)]
    header = ["policy", "hidden", "as it is, ms", "torch.compile, ms", "gain", "first update, s"]
    body = (
        f"Updates of {N_ENVS} environments x {N_STEPS} steps, 4 epochs, batches of 1,024 samples, twin critics of 32 "
        f"quantiles, one thread, CPU time, medians of {args.repeats} in turns. The gain is the median of the ratios. "
        f"LSTM policies do not go through torch at all.\n\n{markdown_table(header, rows)}"
    )
    publish("torch-compile", "torch.compile", MODULE, body, args.dry)


if __name__ == "__main__":
    main()
