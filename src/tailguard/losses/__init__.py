"""Losses and risk measures as pure functions of tensors."""

from tailguard.losses.risk import cvar, monotone, spectral, var, wang
from tailguard.losses.surrogate import clipped_surrogate, kl_estimate, masked_mean
from tailguard.losses.value import clip_quantiles, cross_entropy, quantile_huber, two_hot

__all__ = [
    "clip_quantiles",
    "clipped_surrogate",
    "cross_entropy",
    "cvar",
    "kl_estimate",
    "masked_mean",
    "monotone",
    "quantile_huber",
    "spectral",
    "two_hot",
    "var",
    "wang",
]
