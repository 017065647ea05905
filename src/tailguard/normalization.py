"""Running moments, the return scale of the critics, and observation statistics that follow the rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from tailguard.configuration import Config, PositiveFloat
from tailguard.errors import ConfigError, InertSetting, StateError
from tailguard.stateful import require_keys

Floats = NDArray[np.floating[Any]]


class Affine(NamedTuple):
    """Raw = mean + std * normalized."""

    mean: float
    std: float


class ReturnScaleConfig(Config):
    """How the critics' unit follows the returns (docs/algorithm.md, eq. 5)."""

    enabled: bool = True
    """Off: the critics work in raw reward units."""
    min_std: PositiveFloat = 1e-6
    """Floor on sigma, in reward units."""
    max_change: Annotated[float, Field(gt=1.0)] | None = None
    """Cap on sigma's relative change per update (2 lets it at most double or halve); None leaves it free."""
    horizon: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Updates after which returns are forgotten; None: never. Give one where rewards change their size for good."""

    def inert(self) -> Iterable[InertSetting]:
        if not self.enabled:
            others = [name for name in type(self).model_fields if name != "enabled"]
            yield from self.unread(others, "the critics work in raw reward units; use enabled=True")


class ReturnScale:
    """Mean and std of the returns seen so far, or in the last updates, merged exactly, and the snapshot critics use."""

    def __init__(self, config: ReturnScaleConfig | None = None) -> None:
        self.config = config or ReturnScaleConfig()
        self.count, self.mean, self.m2 = 0, 0.0, 0.0
        self.recent = np.zeros((0, 3))  # count, mean and m2 of each update that is remembered, where there is a horizon
        self.snapshot = Affine(0.0, 1.0)  # what predictions are decoded with until the next update

    @property
    def std(self) -> float:
        """Standard deviation of all returns seen, not below the floor."""
        return max((self.m2 / self.count) ** 0.5, self.config.min_std) if self.count else 1.0

    def merge(self, returns: Floats) -> None:
        """Parallel Welford merge: the result does not depend on how the data is split."""
        n = returns.size
        if n == 0:
            return  # an empty part of a split
        mean, var = float(returns.mean(dtype=np.float64)), float(returns.var(dtype=np.float64))
        total, shift = self.count + n, mean - self.mean
        self.m2 += var * n + shift**2 * self.count * n / total
        self.mean += shift * n / total
        self.count = total

    def remember(self, returns: Floats) -> None:
        """Mean and std of the last updates' returns, these included: exactly those, and nothing from before."""
        horizon = self.config.horizon
        if horizon is None:
            self.merge(returns)
            return
        if self.count and not len(self.recent):  # saved without a horizon: all that was seen counts as one update
            self.recent = np.array([[self.count, self.mean, self.m2]])
        mean, var = float(returns.mean(dtype=np.float64)), float(returns.var(dtype=np.float64))
        newest = [returns.size, mean, var * returns.size]
        self.recent = np.concatenate([self.recent, [newest]])[-horizon:]
        counts, means, m2s = self.recent.T
        self.count = int(counts.sum())
        self.mean = float(counts @ means) / self.count
        self.m2 = float(m2s.sum() + counts @ np.square(means - self.mean))

    def calibrate(self, returns: Floats) -> None:
        """Before the first prediction is decoded: a unit of the right size, so that fresh critics start near the truth.

        It is a starting point, not a statistic: nothing is counted, and `update` moves on from it.
        """
        if self.config.enabled and self.count == 0 and returns.size:
            self.snapshot = Affine(float(returns.mean()), max(float(returns.std()), self.config.min_std))

    def update(self, returns: Floats) -> tuple[Affine, Affine]:
        """Merge one rollout's returns and move the snapshot: (before, after), for the critics to follow."""
        before, first = self.snapshot, self.count == 0
        if self.config.enabled and returns.size:
            self.remember(returns)
            cap = self.config.max_change
            std = self.std if cap is None or first else float(np.clip(self.std, before.std / cap, before.std * cap))
            self.snapshot = Affine(self.mean, std)
        return before, self.snapshot

    def state_dict(self) -> dict[str, Any]:
        remembered = {} if self.config.horizon is None else {"recent": self.recent.copy()}
        snapshot = list(self.snapshot)
        return {"count": self.count, "mean": self.mean, "m2": self.m2, "snapshot": snapshot, **remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """State with or without a horizon: where there is none any more, what is remembered now stays."""
        state = dict(state)
        recent = np.array(state.pop("recent", np.zeros((0, 3))), dtype=np.float64).reshape(-1, 3)
        if self.config.horizon is None:
            recent = recent[:0]
        require_keys(self, state if self.config.horizon is None else {**state, "recent": recent})
        if not np.isfinite(recent).all() or (recent[:, 0] < 1).any() or (recent[:, 2] < 0).any():
            raise StateError("recent of a return scale needs rows of a count of at least 1, a mean, and an m2 >= 0.")
        self.recent = recent
        self.count, self.mean, self.m2 = int(state["count"]), float(state["mean"]), float(state["m2"])
        self.snapshot = Affine(*(float(number) for number in state["snapshot"]))


class ObservationStatistics:
    """The moments of SB3's VecNormalize: frozen while a rollout is collected, moved between rollouts.

    Without a VecNormalize every method does nothing, so the training loop needs no case distinction.
    """

    def __init__(self, normalizer: VecNormalize | None) -> None:
        self.normalizer = normalizer if normalizer is not None and normalizer.norm_obs else None
        self.wrapper = normalizer

    @property
    def moments(self) -> RunningMeanStd:
        """Mean, variance and count of a normalizer that is present."""
        return self.normalizer.obs_rms  # type: ignore[union-attr,return-value]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While stepping: what the policy sees when it acts is what it sees when it trains."""
        if self.wrapper is None:
            yield
            return
        before, self.wrapper.training = self.wrapper.training, False
        try:
            yield
        finally:
            self.wrapper.training = before

    def original(self) -> Floats | None:
        """The last observations before normalization."""
        return None if self.normalizer is None else self.normalizer.get_original_obs()  # type: ignore[return-value]

    def update(self, observations: Floats) -> tuple[float, float]:
        """Merge one rollout's raw observations; returns the drift of mean and std in units of the old std."""
        if self.normalizer is None or not self.normalizer.training:
            return 0.0, 0.0
        moments = self.moments
        old_mean, old_std = moments.mean.copy(), np.sqrt(moments.var + self.normalizer.epsilon)
        moments.update(observations.reshape(-1, *moments.mean.shape))
        new_std = np.sqrt(moments.var + self.normalizer.epsilon)
        return (
            float(np.abs((moments.mean - old_mean) / old_std).max()),
            float(np.abs(new_std / old_std - 1.0).max()),
        )

    def normalize(self, observations: Floats) -> Floats:
        """Raw observations in the units of the current statistics."""
        return observations if self.normalizer is None else self.normalizer.normalize_obs(observations)  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        if self.normalizer is None:
            return {"present": False}
        moments = self.moments
        return {
            "present": True,
            "mean": np.array(moments.mean),
            "var": np.array(moments.var),
            "count": float(moments.count),
            "clip_obs": float(self.normalizer.clip_obs),
            "epsilon": float(self.normalizer.epsilon),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state["present"]:
            return
        if self.normalizer is None:
            raise StateError(
                "This agent was trained on observations normalized by VecNormalize, but the environment given has no "
                "VecNormalize(norm_obs=True). Wrap it; its statistics are taken from the saved agent."
            )
        moments = self.moments
        if np.shape(moments.mean) != np.shape(state["mean"]):
            raise StateError(
                f"The saved observation statistics have shape {np.shape(state['mean'])}, "
                f"the environment's observations {np.shape(moments.mean)}."
            )
        moments.mean, moments.var = np.array(state["mean"]), np.array(state["var"])
        moments.count = float(state["count"])
        self.normalizer.clip_obs, self.normalizer.epsilon = float(state["clip_obs"]), float(state["epsilon"])


def refuse_two_return_scales(normalizer: VecNormalize | None, config: ReturnScaleConfig) -> None:
    """VecNormalize(norm_reward=True) rescales rewards under the critics' feet."""
    if normalizer is not None and normalizer.norm_reward and config.enabled:
        raise ConfigError(
            "VecNormalize(norm_reward=True) and the agent's own return scale would both rescale the rewards, and their "
            "statistics drift apart. Use VecNormalize(env, norm_reward=False), or switch the agent's off with "
            'return_scale={"enabled": False}.'
        )
