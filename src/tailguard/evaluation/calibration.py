"""Predicted against realised returns on held-out episodes: collect them, summarise them, draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecEnv

from tailguard.errors import DataError
from tailguard.losses.calibration import coverage, pinball_skill, pit_histogram, realised_cvar
from tailguard.losses.risk import cvar_weights, interpolation_weights
from tailguard.ppo import DistributionalPPO

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """Laws predicted step by step, and what the return from there came to."""

    quantiles: Array  # (n, Q) at `levels`, raw reward units
    realised: Array  # (n,) discounted rewards that followed
    levels: tuple[float, ...]

    @property
    def coverage(self) -> Array:
        """(Q,) share of returns at or below each predicted quantile."""
        return np.asarray(coverage(self.quantiles, self.realised))

    @property
    def worst(self) -> float:
        """Largest distance between a level and its coverage."""
        return float(np.abs(self.coverage - np.asarray(self.levels)).max())

    @property
    def pit_histogram(self) -> Array:
        """(10,) 1 everywhere when calibrated."""
        return np.asarray(pit_histogram(self.quantiles, self.realised, self.levels))

    @property
    def skill(self) -> Array:
        """(Q,) 1 - pinball loss over that of the best constant forecast."""
        return np.asarray(pinball_skill(self.quantiles, self.realised, self.levels))

    def cvar(self, alpha: float) -> tuple[float, float]:
        """Mean predicted CVaR_alpha, and the same from what was realised."""
        predicted = self.quantiles @ np.asarray(cvar_weights(self.levels, alpha, "normal"))
        if alpha == 1.0:
            return float(predicted.mean()), float(self.realised.mean())
        threshold = (self.quantiles @ interpolation_weights(self.levels, np.array([alpha])))[:, 0]
        return float(predicted.mean()), realised_cvar(threshold, self.realised, alpha)


def held_out(
    model: DistributionalPPO, env: VecEnv, n_steps: int, *, warm_up: int = 0, tolerance: float = 0.01
) -> HeldOut:
    """Act in `env` as in training (sampled actions: the critics judge the policy that explores) and compare.

    Steps that the environment marks with info["valid"] = False are not compared: no critic learns their law.

    warm_up:   leading steps that are not compared, for the memory to fill
    tolerance: a step counts when at most this weight of its return is unknown: after a truncation, and after the last
               step, the rest is; after a termination nothing is
    """
    n_envs, gamma = env.num_envs, model.config.gamma
    levels = model.config.critic.levels
    laws = np.zeros((n_steps, n_envs, len(levels)))
    rewards, going_on = np.zeros((n_steps, n_envs)), np.zeros((n_steps, n_envs))
    unknown_after = np.zeros((n_steps, n_envs))  # weight of what a truncation hides
    valid = np.ones((n_steps, n_envs), np.bool_)
    obs: Any = env.reset()
    state, start = None, np.ones(n_envs, np.bool_)
    for t in range(n_steps):
        laws[t] = model.predict_quantiles(obs, state, start)
        action, state = model.predict(obs, state, start, deterministic=False)
        obs, rewards[t], start, infos = env.step(action)
        cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        going_on[t], unknown_after[t] = ~start, start & cut
        valid[t] = [info.get("valid", True) for info in infos]
    realised, unknown = np.zeros((n_steps, n_envs)), np.zeros((n_steps, n_envs))
    total, hidden = np.zeros(n_envs), np.ones(n_envs)
    for t in range(n_steps - 1, -1, -1):
        total = rewards[t] + gamma * going_on[t] * total
        hidden = gamma * (going_on[t] * hidden + unknown_after[t])
        realised[t], unknown[t] = total, hidden
    known = (unknown <= tolerance) & valid
    known[:warm_up] = False
    if not known.any():
        raise DataError(
            f"No valid step of {n_steps} has a return that is known to {100 * (1 - tolerance):g} %: "
            f"with gamma={gamma} run longer episodes, or allow a larger tolerance."
        )
    return HeldOut(laws[known], realised[known], levels)


def draw(found: HeldOut, path: str | Path, title: str = "") -> None:
    """Coverage against level, and the histogram of the transform, as one SVG or PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.0))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    levels: Sequence[float] = found.levels
    left.plot([0, 1], [0, 1], color="grey", lw=0.8)
    left.fill_between([0, 1], [-0.02, 0.98], [0.02, 1.02], color="grey", alpha=0.2, lw=0, label="2 points")
    left.plot(levels, found.coverage, ".", label="realised")
    left.set(xlabel="predicted level", ylabel="share of returns below", xlim=(0, 1), ylim=(0, 1), title=title)
    left.legend(frameon=False, fontsize=8)
    bins = found.pit_histogram
    right.bar((np.arange(len(bins)) + 0.5) / len(bins), bins, width=0.9 / len(bins))
    right.axhline(1.0, color="grey", lw=0.8)
    right.set(xlabel="place of the return in its predicted law", ylabel="frequency, 1 when calibrated")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
