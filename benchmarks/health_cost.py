"""What watching costs: training with all figures and alerts beside the same training with none, in turns.

    python -m benchmarks.health_cost [--presets regime crash] [--repeats 40] [--write]

Without: no figure of rollout, calibration, memory, trading, clip fraction or first log-ratio, no explained variance, no
gradient norm of a critic, no gradient noise (which is measured also where it scales nothing), no alert. The learner's
own means (loss, entropy, KL) stay, since controllers and early stopping read them. Nothing is left out of the library
for this: the functions are taken away from outside, and both sides end with the same weights.

On a machine that others use the difference of two trainings is mostly noise, so the CPU time inside the same functions
is measured too, over that of the rest of the training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import torch
from stable_baselines3.common.logger import Logger

from benchmarks.results import markdown_table, write_section
from tailguard.checkpoint import state_digest
from tailguard.health.alerts import AlertMonitor
from tailguard.optim import VarianceGradientScaler
from tailguard.ppo import DistributionalPPO, algorithm, objective, update
from tailguard.ppo.watch import TradingSample
from tailguard.presets import preset

Replaced = tuple[object, str, Callable[..., Any]]

NOISE: tuple[Replaced, ...] = (
    (VarianceGradientScaler, "scale_gradients", lambda self, optimizer: 1.0),
    (VarianceGradientScaler, "step", lambda self: None),
)
FIGURES: tuple[Replaced, ...] = (
    (algorithm, "rollout_figures", lambda *_: {}),
    (algorithm, "calibration_figures", lambda *_: {}),
    (algorithm, "state_figures", lambda *_: {}),
    (algorithm, "gradient_figures", lambda *_: {}),
    (algorithm, "explained_variance", lambda *_: 0.0),
    (objective, "ratio_figures", lambda *_: (0.0, 0.0)),
    (update, "critic_norms", lambda *_: {}),
    (TradingSample, "note", lambda *_: None),
    (TradingSample, "figures", lambda *_: {}),
    (AlertMonitor, "check", lambda *_: []),
)
ALL = FIGURES + NOISE
COLUMNS = (
    "two trainings: all",
    "without gradient noise",
    "inside the functions: all",
    "without gradient noise",
)


@contextmanager
def without(functions: tuple[Replaced, ...]) -> Iterator[None]:
    """While inside, these do nothing."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    try:
        for owner, name, nothing in functions:
            setattr(owner, name, nothing)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class Trainee:
    """An agent on one thread that trains update by update, with the schedules of the preset's whole training."""

    def __init__(self, name: str, left_out: tuple[Replaced, ...]) -> None:
        chosen = preset(name)
        self.agent, self.left_out = chosen.agent(0), left_out
        self.agent.learner.n_threads = 1
        self.agent.set_logger(Logger(None, []))
        self.total, self.callback = self.agent._setup_learn(chosen.total_timesteps)
        self.callback.on_training_start({}, {})

    def seconds(self) -> float:
        """CPU time of one rollout and update."""
        agent = self.agent
        assert agent.env is not None
        with without(self.left_out):
            began = time.process_time()
            agent.collect_rollouts(agent.env, self.callback, agent.rollout_buffer, agent.config.n_steps)
            agent._update_current_progress_remaining(agent.num_timesteps, self.total)
            agent.train()
            return time.process_time() - began


def timed(functions: tuple[Replaced, ...], spent: list[float]) -> tuple[Replaced, ...]:
    """The same functions, with the CPU time inside them noted."""

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*arguments)
            finally:
                spent.append(time.thread_time() - began)

        return run

    return tuple((owner, name, watched(getattr(owner, name))) for owner, name, _ in functions)


def share_inside(name: str, functions: tuple[Replaced, ...], repeats: int) -> list[float]:
    """CPU time inside the functions over that of all the rest, per update."""
    spent: list[float] = []
    trainee = Trainee(name, timed(functions, spent))
    trainee.seconds()
    shares = []
    for _ in range(repeats):
        spent.clear()
        total = trainee.seconds()
        shares.append(sum(spent) / (total - sum(spent)))
    return shares


def weights_of(agent: DistributionalPPO) -> str:
    return state_digest({"policy": agent.policy.state_dict()})


def measure(name: str, repeats: int) -> dict[str, list[float]]:
    """Cost of watching as a share of unwatched training, per repeat: all of it, and without the gradient noise."""
    sides: dict[str, tuple[Replaced, ...]] = {"watched": (), "noise_left_out": NOISE, "unwatched": ALL}
    trainees = {side: Trainee(name, left_out) for side, left_out in sides.items()}
    for trainee in trainees.values():  # compile and allocate
        trainee.seconds()
    shares: dict[str, list[float]] = {"all": [], "without gradient noise": []}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 else list(sides)[::-1]  # who comes first finds other caches
        spent = {side: trainees[side].seconds() for side in order}
        shares["all"].append(spent["watched"] / spent["unwatched"] - 1.0)
        shares["without gradient noise"].append(spent["noise_left_out"] / spent["unwatched"] - 1.0)
    assert len({weights_of(trainee.agent) for trainee in trainees.values()}) == 1, "watching must change nothing"
    shares["inside, all"] = share_inside(name, ALL, repeats)
    shares["inside, without gradient noise"] = share_inside(name, FIGURES, repeats)
    return shares


def row_of(name: str, shares: dict[str, list[float]]) -> list[str]:
    """Median and quartiles."""
    cells = []
    for values in shares.values():
        low, _, high = quantiles(values, n=4)
        cells.append(f"{median(values):.1%} ({low:.1%} to {high:.1%})")
    return [name, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of figures and alerts as a share of training.")
    parser.add_argument("--presets", nargs="+", default=["regime", "pairs", "crash"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.presets:
        rows.append(row_of(name, measure(name, options.repeats)))
        print(rows[-1], flush=True)
    table = markdown_table(["preset", *COLUMNS], rows)
    print(f"\n{table}")
    if options.write:
        text = (
            f"CPU time of watched training over unwatched, minus one: median and quartiles of {options.repeats} "
            "updates that took turns in one process, one thread. All end with bit-identical weights. Inside: CPU "
            "time in the functions that watch over that of all the rest. The goal is 3 %."
        )
        command = f"python -m benchmarks.health_cost --presets {' '.join(options.presets)} --repeats {options.repeats}"
        write_section("health-cost", "Cost of watching", f"{command} --write", f"{text}\n\n{table}")


if __name__ == "__main__":
    main()
