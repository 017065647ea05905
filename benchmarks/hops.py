"""How many Python functions and files of the package one collected rollout and one `train()` pass through.

`python -m benchmarks.hops` (SB3's PPO: 27 functions in 9 files of its own, RecurrentPPO: 31 in 11). Comprehensions and
generators count as functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tailguard
from benchmarks.results import markdown_table, parser_of, publish
from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.market.oracles import oracle_market

MODULE = "benchmarks.hops"
PACKAGE = Path(tailguard.__file__).parent


def functions_of(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """(file, function) of the package that a call passes through."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.add((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def hops(optimizer: str) -> dict[str, set[tuple[str, str]]]:
    """Of collecting and of training, after whatever is built or cached at first."""
    env = oracle_env(oracle_market("regime"), n_envs=8, seed=0)
    agent = DistributionalPPO("MlpLstmPolicy", env, n_steps=64, optimizer=optimizer, learning_rate=1e-3, seed=0)
    agent.learn(8 * 64 * 6)
    found: dict[str, set[tuple[str, str]]] = {}

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            results: list[Any] = []
            found[name] = functions_of(lambda: results.append(method(*args, **kwargs)))
            return results[0]

        return call

    for name in ("collect_rollouts", "train"):
        setattr(agent, name, counted(name, getattr(agent, name)))
    agent.learn(8 * 64, reset_num_timesteps=False)
    return found


def main() -> None:
    options = parser_of(MODULE, __doc__).parse_args()
    rows = [
        [optimizer, name, str(len(seen)), str(len({file for file, _ in seen}))]
        for optimizer in ("adam", "adaptive_upgd")
        for name, seen in hops(optimizer).items()
    ]
    table = markdown_table(["optimizer", "call", "functions", "files"], rows)
    publish("hops", "Functions and files that a call passes through", MODULE, table, options.dry)


if __name__ == "__main__":
    main()
