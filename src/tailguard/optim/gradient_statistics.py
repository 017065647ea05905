"""How noisy a gradient is over time, per tensor: running mean and power of the raw gradient, committed step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tailguard.errors import ConfigError, StateError
from tailguard.kernels.optimizer import Float64s, Int64s, ObservedBlocks, observe_gradients

Statistic = Literal["elementwise", "mean", "norm"]

SAMPLING = ((2**13, 1024, 1), (2**17, 64, 4), (2**62, 256, 8))
"""Tensors up to so many elements are observed in blocks of so many, one block in so many: a sum over thousands of
elements says nearly what the sum over all says. The slot of a block moves by the golden section, so that rows and
columns mix evenly."""
GOLDEN_SECTION = 0.6180339887498949
POWER, SIGNAL, COUNT = range(3)
"""Rows of what is kept of K tensors: average sum of squares, sum of squares of the mean, observations."""
ROUNDING = 1e-6  # a mean below this share of the gradient's size is what rounding leaves of a sum that cancels


def observed_blocks(size: int) -> Int64s:
    """(2, B) start and length of the blocks that are observed of a tensor."""
    length, slots = next((length, slots) for most, length, slots in SAMPLING if size <= most)
    cells = np.arange(-(-size // (length * slots)))
    starts = length * (slots * cells + (slots * (cells * GOLDEN_SECTION % 1.0)).astype(np.int64))
    starts = starts[starts < size]
    return np.stack([starts, np.minimum(length, size - starts)])


def blocks_of(sizes: Int64s) -> ObservedBlocks:
    """The observed blocks of tensors of these sizes."""
    blocks = [observed_blocks(size) for size in sizes]
    starts, lengths = np.concatenate(blocks, axis=1)
    return ObservedBlocks(sizes, starts, lengths, np.cumsum([0, *(block.shape[1] for block in blocks)]))


class GradientStatistics:
    """Noise-to-signal ratio sum_i Var_t[x_i] / sum_i E_t[x_i]^2 of each of K tensors.

    x is the gradient itself (`elementwise`), or one number per tensor: its `mean` or its `norm`. The sum of variances
    is the mean power minus the power of the mean, so of all second moments only their sum per tensor is kept. Of a
    large tensor `elementwise` observes evenly spaced blocks, always the same (see SAMPLING).
    """

    def __init__(
        self, params: Iterable[Tensor], statistic: Statistic, beta: float, segments: Sequence[int] | None = None
    ) -> None:
        self.statistic, self.beta = statistic, beta
        self.bind(params, segments)
        self.reset()

    def bind(self, params: Iterable[Tensor], segments: Sequence[int] | None = None) -> None:
        """Read the gradients of these parameters: several tensors, or one flat tensor cut into segments."""
        self.params = [param for param in params if param.numel() > 0]
        if not self.params:
            raise ConfigError(
                "VarianceGradientScaler got no parameters. Pass module.parameters() of a non-empty module."
            )
        if len({param.device for param in self.params}) > 1:
            raise ConfigError("VarianceGradientScaler needs all parameters on one device; use one scaler per device.")
        sizes = [param.numel() for param in self.params]
        if segments is not None:
            if len(sizes) != 1 or min(segments, default=0) < 1 or sum(segments) != sizes[0]:
                raise ConfigError(
                    f"segments={list(segments)[:8]} must be positive sizes that add up to one flat parameter; "
                    f"they sum to {sum(segments)}, the parameters have sizes {sizes[:8]}."
                )
            sizes = list(segments)
        self.sizes = np.array(sizes, dtype=np.int64)  # (K,)

    def reset(self) -> None:
        """Forget everything seen."""
        n = self.sizes.size
        elementwise = self.statistic == "elementwise"
        # one number per tensor is observed like a tensor of one element
        self.blocks = blocks_of(self.sizes if elementwise else np.ones(n, dtype=np.int64))
        wide = not elementwise or any(param.dtype == torch.float64 for param in self.params)
        # element-wise means live beside the gradients, one number per tensor lives on the host
        self.mean = torch.zeros(
            int(self.blocks.observed.sum()),
            dtype=torch.float64 if wide else torch.float32,
            device=self.params[0].device if elementwise else "cpu",
        )
        self.kept = np.zeros((3, n))  # power, signal and count
        self.next = torch.zeros_like(self.mean), np.zeros((3, n))  # both as `commit` takes them over
        self.observed = False
        self.left_out: list[int] = []  # of the K tensors: frozen ones, of which nothing is measured for the time being

    def observe(self) -> None:
        """Merge the gradients as they are now into a copy of the statistics; `commit` takes it over."""
        gradients = [param.grad for param in self.params]
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise ConfigError("VarianceGradientScaler needs dense gradients. Build the embedding with sparse=False.")
        self.observed = any(gradient is not None for gradient in gradients)
        if not self.observed:
            return
        if self.statistic != "elementwise":
            gradients = self.tensor_values(gradients)
        observe_gradients(gradients, self.blocks, self.beta, (self.mean, self.kept), self.next, self.left_out)

    @torch.no_grad()
    def tensor_values(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The mean or the norm of the gradient of each tensor."""
        if len(gradients) == 1 and gradients[0] is not None:
            gradients = torch.split(gradients[0].reshape(-1), self.sizes.tolist())
        return [None if gradient is None else self.value_of(gradient.double()).cpu() for gradient in gradients]

    def value_of(self, gradient: Tensor) -> Tensor:
        mean, size = gradient.mean(), gradient.square().mean().sqrt()
        value: Tensor = gradient.norm() if self.statistic == "norm" else mean.where(mean.abs() > ROUNDING * size, 0.0)
        return value

    def commit(self) -> bool:
        """Take over the last observation; returns whether there was a finite one."""
        # one bad gradient would stay in the averages for ever
        taken = self.observed and isfinite(self.next[1][POWER].sum())
        if taken:
            self.mean, self.kept, self.next = *self.next, (self.mean, self.kept)
        self.observed = False
        return taken

    def ratios(self) -> Float64s:
        """(K,) variance over squared mean, from the mean power and the power of the mean; 0 before two observations.

        The mean of t samples keeps the share `overlap` of their variance, the sum of its squared weights. So the spread
        around it misses that share, and a signal below it cannot be told from zero: it counts as that much. No ratio
        is larger than the window's effective samples.
        """
        power, signal, count = self.kept
        decayed = self.beta ** np.maximum(count, 2.0)
        overlap = (1.0 - self.beta) * (1.0 + decayed) / ((1.0 + self.beta) * (1.0 - decayed))
        known = (count >= 2) & (power > signal) & (overlap < 1.0)
        variance = np.where(known, power - signal, 0.0) / np.where(known, 1.0 - overlap, 1.0)
        return variance / np.where(known, np.maximum(signal, overlap * variance), 1.0)

    def ratio(self) -> float:
        """Mean of the ratios weighted by tensor size, over the tensors seen at least twice."""
        sizes = np.where(self.kept[COUNT] >= 2, self.sizes, 0)
        return float(sizes @ self.ratios() / max(sizes.sum(), 1))

    def state_dict(self) -> dict[str, Any]:
        """What was committed; an observation that waits for its step is not state."""
        return {
            "sizes": self.sizes.tolist(),
            "counts": torch.from_numpy(self.kept[COUNT].astype(np.int64)),
            "power": torch.from_numpy(self.kept[POWER].copy()),
            "signal": torch.from_numpy(self.kept[SIGNAL].copy()),
            "mean": self.mean.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, own in self.state_dict().items():
            saved = state[name]
            if isinstance(own, Tensor) and (
                not isinstance(saved, Tensor) or saved.dtype != own.dtype or saved.shape != own.shape
            ):
                raise StateError(
                    f"Noise statistics: {name} must be {own.dtype} of shape {tuple(own.shape)}. The state is damaged "
                    "or of another network."
                )
        self.mean.copy_(state["mean"])
        for row, name in ((POWER, "power"), (SIGNAL, "signal"), (COUNT, "counts")):
            self.kept[row] = state[name].cpu().numpy()
        self.observed = False
