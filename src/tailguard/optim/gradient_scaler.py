"""Variance gradient scaling: measure how noisy the gradient is over time, and take smaller steps when it is noisy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from tailguard.configuration import Config, Fraction, NonNegativeFloat, NonNegativeInt
from tailguard.errors import ConfigError, StateError
from tailguard.kernels.optimizer import Float64s
from tailguard.optim.gradient_statistics import GradientStatistics, Statistic
from tailguard.optim.upgd import UPGD
from tailguard.stateful import require_keys

STATE_VERSION = 2
FIXED_NOISE_LIMIT = 1e-4
SCALE_FREE = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "Adafactor"}
NOT_SCALE_FREE = {"SGD", "ASGD"}


class VGSConfig(Config):
    """How gradient noise is measured and what is done about it."""

    enabled: bool = True
    """False: measure and report, scale nothing."""
    statistic: Statistic = "elementwise"
    """What the noise-to-signal ratio is taken of: every element, the mean of each tensor, or its norm."""
    alpha: NonNegativeFloat = 0.1
    """Strength: the factor is 1 / (1 + alpha v) for a noise-to-signal ratio v."""
    beta: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.99
    """Averaging over steps; the largest ratio that can be told is (1 + beta) / (1 - beta)."""
    warmup_steps: NonNegativeInt = 100
    """Steps taken before the factor leaves 1."""
    min_scaling_factor: Fraction = 1e-4
    """The factor never falls below."""


class VarianceGradientScaler:
    """Noise-to-signal ratio v of the raw gradient over time, and the factor 1 / (1 + alpha v).

    Per tensor v = sum_i Var_t[g_i] / sum_i E_t[g_i]^2, over tensors the mean weighted by size. One step:

        loss.backward()
        factor = scaler.scale_gradients(optimizer)   # reads raw gradients; the factor uses earlier steps only
        clip_grad_norm_(params, max_norm)
        scaled_step(optimizer, factor)               # a scale-free optimizer takes the factor on its step
        scaler.step()                                # only now the statistics move

    params:   the tensors whose gradients are read, on one device
    segments: for a single flat parameter, the sizes of the tensors that it holds
    The other settings are those of `VGSConfig`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        enabled: bool = True,
        statistic: Statistic = "elementwise",
        alpha: float = 0.1,
        beta: float = 0.99,
        warmup_steps: int = 100,
        min_scaling_factor: float = 1e-4,
        segments: Sequence[int] | None = None,
    ) -> None:
        self.config = VGSConfig(
            enabled=enabled,
            statistic=statistic,
            alpha=alpha,
            beta=beta,
            warmup_steps=warmup_steps,
            min_scaling_factor=min_scaling_factor,
        )
        self.statistics = GradientStatistics(params, statistic, beta, segments)
        self.step_count = 0
        self._noise_checked = False

    def scale_gradients(self, optimizer: Optimizer | None = None) -> float:
        """Observe the raw gradients, then multiply them with the factor of the steps before; returns the factor.

        Given a scale-free optimizer, the gradients stay as they are: hand the factor to `scaled_step`. Without an
        optimizer the gradients are multiplied, which is right for SGD and cancels inside Adam.
        """
        self.statistics.observe()
        factor = self.get_scaling_factor()
        if optimizer is not None:
            self.check_optimizer(optimizer)
        if factor < 1.0 and (optimizer is None or not is_scale_free(optimizer)):
            with torch.no_grad():
                torch._foreach_mul_([param.grad for param in self.statistics.params if param.grad is not None], factor)
        return factor

    def step(self) -> None:
        """Commit the last observation: call it when the optimizer has stepped, and only then."""
        self.step_count += self.statistics.commit()

    def get_scaling_factor(self) -> float:
        """The factor that the next step will take."""
        if not self.config.enabled or self.warmup_active:
            return 1.0
        factor = 1.0 / (1.0 + self.config.alpha * self.get_normalized_variance())
        return min(1.0, max(self.config.min_scaling_factor, factor))

    def get_normalized_variance(self) -> float:
        """Noise-to-signal ratio over all tensors that were seen at least twice; 0 before that."""
        return self.statistics.ratio()

    def get_tensor_variances(self) -> Float64s:
        """The ratio of each tensor, (K,)."""
        return self.statistics.ratios()

    @property
    def warmup_active(self) -> bool:
        return self.step_count < self.config.warmup_steps

    def metrics(self) -> dict[str, float]:
        return {
            "vgs/scaling_factor": self.get_scaling_factor(),
            "vgs/normalized_variance": self.get_normalized_variance(),
            "vgs/step_count": float(self.step_count),
            "vgs/warmup_active": float(self.warmup_active),
        }

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Warn, once, about noise of fixed size beside a gradient that is scaled down."""
        if self._noise_checked or not self.config.enabled:
            return
        self._noise_checked = True
        if not isinstance(optimizer, UPGD) or optimizer.adaptive_noise:
            return
        sigma = max(group["sigma"] for group in optimizer.param_groups)
        if sigma > FIXED_NOISE_LIMIT:
            warnings.warn(
                f"UPGD adds noise of fixed size sigma={sigma:g} to gradients that VGS scales down, so the share of "
                f"noise in the step grows as the factor falls. Use adaptive_noise=True, or "
                f"sigma <= {FIXED_NOISE_LIMIT:g}.",
                stacklevel=2,
            )

    def update_parameters(self, params: Iterable[Tensor], segments: Sequence[int] | None = None) -> None:
        """Read the gradients of these tensors from now on; statistics stay when the sizes are the same."""
        before = self.statistics.sizes, self.statistics.state_dict()
        self.statistics.bind(params, segments)
        self.statistics.reset()
        if np.array_equal(before[0], self.statistics.sizes):
            self.statistics.load_state_dict(before[1])
        else:
            self._forget(f"the parameters changed: {before[0].size} tensors before, {self.statistics.sizes.size} now")

    def state_dict(self) -> dict[str, Any]:
        """Version, configuration and statistics; never parameters."""
        return {
            "version": STATE_VERSION,
            "config": self.config.model_dump(),
            "step_count": self.step_count,
            "statistics": self.statistics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Statistics of the same tensors are kept; what cannot be used is reset, with a warning that says so."""
        version = state.get("version", 0)
        if not isinstance(version, int) or version > STATE_VERSION:
            raise StateError(
                f"VGS state has version {version!r}, this package reads {STATE_VERSION}: update tailguard."
            )
        if version < STATE_VERSION:
            self._forget(f"the state has version {version}, this package writes {STATE_VERSION}")
            return
        require_keys(self, state)
        require_keys(self.statistics, state["statistics"])
        measured, sizes = state["config"]["statistic"], list(state["statistics"]["sizes"])
        if measured != self.config.statistic:
            self._forget(f"the state measures {measured!r}, this scaler {self.config.statistic!r}")
        elif sizes != self.statistics.sizes.tolist():
            self._forget(
                f"the state holds {len(sizes)} tensors, of other sizes than the {self.statistics.sizes.size} here"
            )
        else:
            self.statistics.load_state_dict(state["statistics"])
            self.step_count = int(state["step_count"])

    def _forget(self, reason: str) -> None:
        self.statistics.reset()
        self.step_count = 0
        warnings.warn(
            f"VGS statistics and step count were reset: {reason}. The factor is 1 for the next "
            f"{self.config.warmup_steps} steps.",
            stacklevel=3,
        )


def is_scale_free(optimizer: Optimizer) -> bool:
    """Whether a constant factor on the gradient cancels inside this optimizer; it may say so as `scale_free`."""
    declared = getattr(optimizer, "scale_free", None)
    if declared is not None:
        return bool(declared)
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & SCALE_FREE:
        return True
    if names & NOT_SCALE_FREE:
        return False
    raise ConfigError(
        f"{type(optimizer).__name__} does not say whether a factor on the gradient cancels inside it. Set its "
        "attribute scale_free = True (as Adam: the factor then multiplies the step) or False (as SGD)."
    )


def scaled_step(optimizer: Optimizer, factor: float, closure: Callable[[], float] | None = None) -> Any:
    """optimizer.step(), with the factor on the step where it would cancel on the gradient.

    The rate is multiplied for this one step, so decoupled weight decay shrinks with it, and schedulers never notice.
    """
    if factor == 1.0 or not is_scale_free(optimizer):
        return optimizer.step(closure)
    if not 0.0 < factor <= 1.0:
        raise ConfigError(f"factor={factor!r} must lie in (0, 1].")
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        return optimizer.step(closure)
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
