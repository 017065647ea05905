"""Critic heads: from features to a distribution of the return, in the normalized units of the return scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from tailguard.configuration import Config, Fraction, NonNegativeFloat, PositiveFloat, Width
from tailguard.errors import ConfigError, InertSetting
from tailguard.losses.risk import cell_masses, midpoint_levels, tail_levels
from tailguard.losses.value import ValueClipMode, clip_quantiles, cross_entropy, quantile_huber, two_hot
from tailguard.normalization import Affine
from tailguard.policy.known import is_plain


class CriticConfig(Config):
    """The critics: how many, what they predict, how they are fitted."""

    removed = {"precision": ("float32", "critics are float32 always.")}  # noqa: RUF012

    kind: Literal["quantile", "categorical"] = "quantile"
    """Quantile regression, or probabilities of fixed atoms fitted by two-hot projection."""
    twin: bool = True
    """Two critics with separate trunks and heads, or one."""
    aggregation: Literal["mean", "min"] = "mean"
    """How two critics become one value: the mean of both, or whichever has the lower mean."""
    n_quantiles: Width = 32
    """Quantiles per critic."""
    grid: Literal["midpoint", "tail"] = "midpoint"
    """Levels (i + 1/2)/n, or half of them below `tail_alpha`."""
    tail_alpha: Fraction = 0.05
    """Where the `tail` grid becomes dense."""
    huber_kappa: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    """Width of the quadratic zone in normalized units; a large one pulls the tails towards the mean."""
    n_atoms: Annotated[int, Field(ge=11, le=2**16)] = 101
    """Atoms of a categorical critic."""
    support: PositiveFloat = 8.0
    """A categorical critic's atoms span +- this many standard deviations of the returns."""
    value_clip: NonNegativeFloat | None = None
    """Range, in normalized units, within which predictions may move per update; None switches clipping off."""
    value_clip_mode: ValueClipMode = "mean_only"
    """What is clipped: the mean, mean and spread, or each quantile."""

    @model_validator(mode="after")
    def clipping_needs_quantiles(self) -> CriticConfig:
        if self.value_clip is not None and self.kind == "categorical":
            raise ConfigError(
                "value_clip works on quantiles, and a categorical critic has none to move. "
                'Use kind="quantile", or leave value_clip at None.'
            )
        return self

    def inert(self) -> Iterable[InertSetting]:
        if self.kind == "quantile":
            yield from self.unread(("n_atoms", "support"), 'a quantile critic has no atoms; use kind="categorical"')
        else:
            why = 'a categorical critic is fitted by cross-entropy; use kind="quantile"'
            yield from self.unread(("huber_kappa",), why)
        if not self.twin:
            yield from self.unread(("aggregation",), "there is one critic; use twin=True")
        if self.grid == "midpoint":
            yield from self.unread(("tail_alpha",), 'midpoints are spaced evenly; use grid="tail"')
        elif self.n_quantiles == 1:
            yield from self.unread(("grid", "tail_alpha"), "a single quantile is the median; raise n_quantiles")
        if self.value_clip is None:
            yield from self.unread(("value_clip_mode",), "nothing is clipped; set value_clip")

    @model_validator(mode="after")
    def levels_lie_apart(self) -> CriticConfig:
        edges = [0.0, *self.levels, 1.0] if self.grid == "tail" else []
        if any(after <= before for before, after in pairwise(edges)):
            raise ConfigError(
                f"tail_alpha={self.tail_alpha} with n_quantiles={self.n_quantiles} leaves no room between "
                'the levels of the tail, or above them. Use a tail_alpha well below 1, or grid="midpoint".'
            )
        return self

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of the quantiles every critic reports."""
        if self.grid == "midpoint" or self.n_quantiles == 1:
            return midpoint_levels(self.n_quantiles)
        return tail_levels(self.n_quantiles, self.tail_alpha)


class CriticHead(nn.Module):
    """What the learner needs to know of a critic's output. Everything is in normalized units."""

    def __init__(self, config: CriticConfig) -> None:
        super().__init__()
        self.config, self.levels = config, config.levels
        masses = torch.tensor(cell_masses(self.levels), dtype=torch.float32)
        self.register_buffer("masses", masses, persistent=False)
        self.masses: Tensor

    def quantiles(self, output: Tensor) -> Tensor:
        """Quantiles (..., Q) of the predicted distribution at the grid's levels."""
        raise NotImplementedError

    def loss(self, output: Tensor, target: Tensor, old_quantiles: Tensor | None) -> Tensor:
        """Loss (...) against samples (..., K) of the return."""
        raise NotImplementedError

    def rescale(self, before: Affine, after: Affine, first: bool) -> tuple[float, float]:
        """Move to another unit so that decoded predictions stay; returns the factors on the last layer's weights
        and on its gradients."""
        raise NotImplementedError

    def moved(self, before: Affine, after: Affine, first: bool) -> tuple[float, float]:
        """`rescale`, proven where the head is not plainly one of ours: a hook or a subclass may read its last layer in
        a way that does not follow."""
        last = self.last_layer
        plain = (is_plain(self, QuantileHead) or is_plain(self, CategoricalCriticHead)) and is_plain(last, nn.Linear)
        if plain:
            return self.rescale(before, after, first)
        kept, probe = (
            deepcopy(self.state_dict()),
            torch.linspace(-1.0, 1.0, 8 * last.in_features).view(8, -1).to(self.masses),
        )
        old = before.mean + before.std * self.probed(probe)
        factors = self.rescale(before, after, first)
        new = after.mean + after.std * self.probed(probe)
        spread = max(before.std, float(old.abs().max()))
        if not first and float((new - old).abs().max()) > 1e-4 * spread:
            self.load_state_dict(kept)
            raise ConfigError(
                f"A critic's {type(self).__name__} reads its last layer in a way that does not follow the return "
                'scale: predictions would jump when it moves. Use return_scale={"enabled": False}, or override '
                "`rescale` so that decoded quantiles stay."
            )
        return factors

    @torch.no_grad()
    def probed(self, features: Tensor) -> Tensor:
        """Quantiles in double precision."""
        return self.quantiles(self(features)).double()

    @property
    def last_layer(self) -> nn.Linear:
        raise NotImplementedError


class QuantileHead(CriticHead):
    """One output per level; starts as the standard normal law."""

    def __init__(self, in_features: int, config: CriticConfig) -> None:
        super().__init__(config)
        self.output = nn.Linear(in_features, len(self.levels))
        nn.init.orthogonal_(self.output.weight, 0.1)
        with torch.no_grad():
            self.output.bias.copy_(torch.special.ndtri(torch.tensor(self.levels, dtype=torch.float64)))

    def forward(self, features: Tensor) -> Tensor:
        return self.output(features)  # type: ignore[no-any-return]

    def quantiles(self, output: Tensor) -> Tensor:
        return output

    def loss(self, output: Tensor, target: Tensor, old_quantiles: Tensor | None) -> Tensor:
        kappa = self.config.huber_kappa
        loss = quantile_huber(output, target, kappa, self.levels)
        if self.config.value_clip is not None and old_quantiles is not None:
            clip_range, mode = self.config.value_clip, self.config.value_clip_mode
            clipped = clip_quantiles(output, old_quantiles, clip_range, mode, self.levels)
            loss = torch.maximum(loss, quantile_huber(clipped, target, kappa, self.levels))
        return loss

    @torch.no_grad()
    def rescale(self, before: Affine, after: Affine, first: bool) -> tuple[float, float]:
        factor = before.std / after.std
        self.output.weight.mul_(factor)
        self.output.bias.mul_(factor).add_((before.mean - after.mean) / after.std)
        return factor, 1.0  # the slope of the pinball loss has no unit, so gradients keep their size

    @property
    def last_layer(self) -> nn.Linear:
        return self.output


class CategoricalCriticHead(CriticHead):
    """Probabilities of evenly spaced atoms.

    Probabilities cannot be rescaled like quantiles, so the atoms stay where they are in raw units when the unit moves
    (offset and stretch follow), and are laid anew only when they no longer fit the returns.
    """

    def __init__(self, in_features: int, config: CriticConfig) -> None:
        super().__init__(config)
        self.output = nn.Linear(in_features, config.n_atoms)
        nn.init.orthogonal_(self.output.weight, 0.01)
        atoms = torch.linspace(-config.support, config.support, config.n_atoms)
        with torch.no_grad():
            self.output.bias.copy_(-0.5 * atoms.square())  # starts near the standard normal law
        self.register_buffer("atoms", atoms, persistent=False)
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("stretch", torch.ones(()))
        self.register_buffer("tau", torch.tensor(self.levels, dtype=torch.float32), persistent=False)
        self.atoms: Tensor
        self.offset: Tensor
        self.stretch: Tensor
        self.tau: Tensor

    @property
    def support(self) -> Tensor:
        """Positions of the atoms in the current unit."""
        return self.offset + self.stretch * self.atoms

    def forward(self, features: Tensor) -> Tensor:
        return self.output(features)  # type: ignore[no-any-return]

    def quantiles(self, output: Tensor) -> Tensor:
        probabilities = output.softmax(-1)
        below = probabilities.cumsum(-1) - 0.5 * probabilities  # mass below each atom, itself counted half
        tau = self.tau.expand(*output.shape[:-1], -1).contiguous()
        right = torch.searchsorted(below.contiguous(), tau).clamp(1, output.shape[-1] - 1)
        low, high = below.gather(-1, right - 1), below.gather(-1, right)
        share = ((tau - low) / (high - low).clamp(min=1e-8)).clamp(0.0, 1.0)
        support = self.support
        return support[right - 1] + share * (support[right] - support[right - 1])

    def loss(self, output: Tensor, target: Tensor, old_quantiles: Tensor | None) -> Tensor:
        return cross_entropy(output, two_hot(target, self.support))

    @torch.no_grad()
    def rescale(self, before: Affine, after: Affine, first: bool) -> tuple[float, float]:
        factor = before.std / after.std
        self.stretch.mul_(factor)
        self.offset.mul_(factor).add_((before.mean - after.mean) / after.std)
        fits = 0.5 <= float(self.stretch) <= 2.0 and abs(float(self.offset)) <= 2.0
        if first or not fits:
            self.stretch.fill_(1.0)
            self.offset.zero_()
        return 1.0, 1.0

    @property
    def last_layer(self) -> nn.Linear:
        return self.output


def make_critic_head(in_features: int, config: CriticConfig) -> CriticHead:
    kinds: dict[str, Any] = {"quantile": QuantileHead, "categorical": CategoricalCriticHead}
    return kinds[config.kind](in_features, config)  # type: ignore[no-any-return]


def aggregate(quantiles: Sequence[Tensor], masses: Tensor, how: Literal["mean", "min"]) -> Tensor:
    """One law from one or two critics' (..., Q): the mean of their quantile functions, or the lower of them (eq. 4)."""
    if len(quantiles) == 1:
        return quantiles[0]
    first, second = quantiles
    if how == "mean":
        return (first + second) / 2
    lower = (first @ masses) <= (second @ masses)
    return torch.where(lower.unsqueeze(-1), first, second)
