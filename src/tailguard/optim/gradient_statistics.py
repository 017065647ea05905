"""How noisy a gradient is over time, per tensor: running mean and power of the raw gradient, committed step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailguard.errors import ConfigError, StateError
from tailguard.optim import kernels
from tailguard.optim.gating import flat, is_fusable
from tailguard.optim.kernels import Array

Statistic = Literal["elementwise", "mean", "norm"]

SAMPLING = ((2**13, kernels.BLOCK, 1), (2**17, 64, 4), (2**62, 256, 8))
"""Tensors up to so many elements are observed in blocks of so many, one block in so many: a sum over thousands of
elements says nearly what the sum over all says. The slot of a block moves by the golden section, so that rows and
columns mix evenly."""
GOLDEN_SECTION = 0.6180339887498949
ROUNDING = 1e-6  # a mean below this share of the gradient's size is what rounding leaves of a sum that cancels


@dataclass
class Piece:
    """A parameter, which of the K tensors it holds, and where each of them ends."""

    tensors: slice
    ends: Array
    param: Tensor


class Reading(NamedTuple):
    """What `kernels.observe_gradients` is told."""

    addresses: Array
    blocks: Array
    firsts: Array
    mean: Array
    new_mean: Array
    kept: Array
    new: Array
    beta: float


POWER, SIGNAL, COUNT = range(3)
"""Rows of what is kept of K tensors: mean sum of squares, sum of squares of the mean, observations."""
WEIGHT = COUNT
"""Row of a new observation: its share in the new averages, 0 for a tensor without gradient."""


def observed_blocks(size: int) -> Array:
    """(2, B) start and length of the blocks that are observed of a tensor."""
    length, slots = next((length, slots) for most, length, slots in SAMPLING if size <= most)
    cells = np.arange(-(-size // (length * slots)))
    starts = length * (slots * cells + (slots * (cells * GOLDEN_SECTION % 1.0)).astype(np.int64))
    starts = starts[starts < size]
    return np.stack([starts, np.minimum(length, size - starts)])


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
        self.segmented = segments is not None
        holds = [slice(0, len(sizes))] if self.segmented else [slice(i, i + 1) for i in range(len(sizes))]
        ends = [np.cumsum(self.sizes[tensors]) for tensors in holds]
        self.pieces = [Piece(*piece) for piece in zip(holds, ends, self.params, strict=True)]

    def reset(self) -> None:
        """Forget everything seen."""
        k, elementwise = self.sizes.size, self.statistic == "elementwise"
        blocks = [observed_blocks(size) for size in self.sizes]
        self.blocks = np.concatenate(blocks, axis=1)  # (2, B)
        self.firsts = np.cumsum([0, *(block.shape[1] for block in blocks)])  # (K + 1,)
        self.observed = np.array([block[1].sum() for block in blocks])  # (K,) elements
        wide = not elementwise or any(param.dtype == torch.float64 for param in self.params)
        # element-wise means live beside the gradients, one number per tensor lives on the host
        self.mean = torch.zeros(
            int(self.observed.sum()) if elementwise else k,
            dtype=torch.float64 if wide else torch.float32,
            device=self.params[0].device if elementwise else "cpu",
        )
        self.spare = self.mean.clone()  # where the next mean is made, so that a step not taken leaves no trace
        self.on_host = (self.mean.numpy(), self.spare.numpy()) if self.mean.is_cpu else None  # the same memory
        self.kept, self.new = np.zeros((3, k)), np.zeros((3, k))
        self.pending = False
        vars(self).pop("_observed_places", None)  # made anew when asked for
        self.places = 4 * (np.cumsum(self.sizes) - self.sizes)  # of a flat gradient's segments, in bytes
        self.addresses = np.zeros(k, np.int64)  # of the tensors' gradients, 0 for none
        self._ratio: float | None = 0.0  # of the committed statistics, once somebody asked

    def ratios(self) -> Array:
        """(K,) noise-to-signal ratio; 0 for a tensor seen less than twice, at most the window's effective samples."""
        ratios: Array = kernels.noise_ratios(self.kept, self.beta)
        return ratios

    def ratio(self) -> float:
        """Mean of the ratios weighted by tensor size, over the tensors seen at least twice."""
        if self._ratio is None:
            self._ratio = float(kernels.mean_noise_ratio(self.kept, self.sizes, self.beta))
        return self._ratio

    def commit(self) -> bool:
        """Take over the last observation; returns whether there was a finite one."""
        waited, self.pending = self.pending, False
        # one bad gradient would stay in the averages for ever
        if not waited or not kernels.commit_gradients(self.kept, self.new):
            return False
        return bool(self.follow(1))

    def follow(self, n_committed: int) -> int:
        """Somebody has committed so many observations, the means by turns; returns how many."""
        if n_committed % 2:
            self.mean, self.spare = self.spare, self.mean
            self.on_host = self.on_host and self.on_host[::-1]
        self._ratio = None
        return n_committed

    def observe(self) -> None:
        """Merge the gradients as they are now into a copy of the statistics; `commit` takes it over."""
        grads = [param.grad for param in self.params]
        self._refuse_sparse(grads)
        if self.fusable(grads):
            kernels.observe_gradients(*self.reading(grads))
            self.pending = any(grad is not None for grad in grads)
            return
        seen = np.array([grad is not None for grad in grads])
        if self.segmented:
            seen = np.repeat(seen, self.sizes.size)
        self.new[WEIGHT] = kernels.newest_weights(seen, self.kept[COUNT], self.beta)
        if self.statistic == "elementwise":
            self._merge_torch()
        else:
            self._merge_values(self._tensor_values(all(is_fusable(param) for param in self.params)))
        self.pending = bool(seen.any())

    def fusable(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether one call can read all of them where they lie."""
        return self.statistic == "elementwise" and all(grad is None or is_fusable(grad) for grad in grads)

    def reading(self, grads: Sequence[Tensor | None]) -> Reading:
        """What that call is told; once it was made, an observation is pending."""
        found = [0 if grad is None else grad.data_ptr() for grad in grads]
        self.addresses[:] = found
        if self.segmented and any(found):
            self.addresses += self.places
        assert self.on_host is not None  # noqa: S101 (a gradient that can be fused is on the host)
        return Reading(self.addresses, self.blocks, self.firsts, *self.on_host, self.kept, self.new, self.beta)

    @staticmethod
    def _refuse_sparse(grads: Sequence[Tensor | None]) -> None:
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise ConfigError("VarianceGradientScaler needs dense gradients. Build the embedding with sparse=False.")

    def _merge_values(self, values: Array) -> None:
        """One number per tensor: the host's own arithmetic."""
        assert self.on_host is not None  # noqa: S101 (one number per tensor lives there)
        mean, spare = self.on_host
        spare[:] = mean + self.new[WEIGHT] * (values - mean)
        self.new[POWER], self.new[SIGNAL] = values**2, spare**2

    @torch.no_grad()
    def _merge_torch(self) -> None:
        """Any device and type, and one transfer of 2 K numbers to the host."""
        gradient = self._flat_gradient()[self._observed_places]
        lengths = torch.from_numpy(self.observed).to(gradient.device)
        weights = torch.from_numpy(self.new[WEIGHT]).to(self.mean.device, self.mean.dtype)
        torch.lerp(self.mean, gradient.to(self.mean.dtype), weights.repeat_interleave(lengths), out=self.spare)
        squares = torch.stack([gradient.double().square(), self.spare.double().square()], dim=1)
        self.new[POWER], self.new[SIGNAL] = torch.segment_reduce(squares, "sum", lengths=lengths).cpu().numpy().T

    @cached_property
    def _observed_places(self) -> Tensor:
        """Where the observed elements lie among all elements, tensor after tensor; until `reset`."""
        tensor_starts = np.repeat(np.cumsum(self.sizes) - self.sizes, np.diff(self.firsts))
        starts, lengths = self.blocks
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return torch.from_numpy(np.repeat(tensor_starts + starts, lengths) + within).to(self.mean.device)

    def _flat_gradient(self) -> Tensor:
        """All gradients one after another, zeros where there is none (their weight is zero too)."""
        return torch.cat(
            [param.new_zeros(param.numel()) if param.grad is None else param.grad.reshape(-1) for param in self.params]
        )

    def _tensor_values(self, fused: bool) -> Array:
        """(K,) the mean or the norm of each tensor."""
        sums, squares = self._sums_fused() if fused else self._sums_torch()
        if self.statistic == "norm":
            return np.sqrt(squares)
        means = sums / self.sizes
        rms = np.sqrt(squares / self.sizes)
        return np.where(np.abs(means) <= ROUNDING * rms, 0.0, means)

    def _sums_fused(self) -> tuple[Array, Array]:
        sums, squares = np.zeros(self.sizes.size), np.zeros(self.sizes.size)
        for piece in self.pieces:
            if piece.param.grad is not None:
                kernels.segment_sums(flat(piece.param.grad), piece.ends, sums[piece.tensors], squares[piece.tensors])
        return sums, squares

    @torch.no_grad()
    def _sums_torch(self) -> tuple[Array, Array]:
        gradient = self._flat_gradient().double()
        lengths = torch.from_numpy(self.sizes).to(gradient.device)
        both = torch.stack([gradient, gradient.square()], dim=1)
        sums, squares = torch.segment_reduce(both, "sum", lengths=lengths).cpu().numpy().T
        return sums, squares

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
        for row, name in enumerate(("power", "signal", "counts")):
            self.kept[row] = state[name].cpu().numpy()
        self._ratio = None
        self.pending = False
