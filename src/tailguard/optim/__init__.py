"""Optimizers that keep learning, and a scaler that takes smaller steps when gradients are noisy. Pure torch."""

from tailguard.optim.adaptive_upgd import AdaptiveUPGD
from tailguard.optim.gradient_scaler import VarianceGradientScaler, VGSConfig, is_scale_free, scaled_step
from tailguard.optim.upgd import UPGD
from tailguard.optim.upgdw import UPGDW

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD", "VGSConfig", "VarianceGradientScaler", "is_scale_free", "scaled_step"]
