"""What the gradient of a batch is taken of: a trunk, its loss, and all sequences it may learn from.

Axes: L steps of a sequence, S sequences, F inputs, H units, A action dimensions, Q quantiles, K samples of the return,
P weights of the policy. A job is built once per update; arrays are read where they lie at each call of gradients().
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.layout import TrunkLayout

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass
class ActorJob:
    """An actor, all sequences it may learn from, and where its gradient goes. Built once per update."""

    layout: TrunkLayout
    weights: Floats  # (P,)
    gradient: Floats  # (P,) written at the layout's own places and those of log_std
    observations: Floats  # (L, S, F)
    starts: Bools  # (L, S)
    hidden: Floats  # (layers, S, H)
    cell: Floats
    valid: Bools  # (L, S)
    actions: Floats  # (L, S, A) what the distribution was sampled for; choices as whole numbers
    log_probs: Floats  # (L, S) of the policy that acted
    advantages: Floats  # (L, S)
    log_std_at: int = -1  # offset of log_std (A,) of a Gaussian; -1 if categorical
    n_choices: tuple[int, ...] = ()  # per action dimension of a categorical; empty if Gaussian

    clip_range: float = 0.2
    ent_coef: float = 0.0
    kl_beta: float = 0.0
    scale: float = 1.0  # of the sum over valid samples: share of the batch / number of valid samples
    kernel: Any = field(default=None, init=False, repr=False, compare=False)  # what the native core keeps of it
    kind: ClassVar[str] = "actor"


@dataclass
class CriticJob:
    """A quantile critic, and optionally the risk value that reads its features, as for the actor."""

    layout: TrunkLayout
    weights: Floats  # (P,)
    gradient: Floats  # (P,) written at the layouts' own places
    observations: Floats  # (L, S, F)
    starts: Bools  # (L, S)
    hidden: Floats  # (layers, S, H)
    cell: Floats
    valid: Bools  # (L, S)
    target: Floats  # (L, S, K) samples of the return
    levels: Floats  # (Q,)
    kappa: float
    risk_layout: TrunkLayout | None = None  # dense layers on [features without gradient, observation, period]
    risk: Floats | None = None  # (L, S, 3) two period features and the target
    risk_observations: Floats | None = None  # (L, S, F') those of the critic if None

    scale: float = 1.0  # of the sum over valid samples: vf_coef * share of the batch / number of valid samples
    kernel: Any = field(default=None, init=False, repr=False, compare=False)
    kind: ClassVar[str] = "critic"


@dataclass
class OutputJob:
    """A trunk whose gradients of outputs and features somebody else has found: torch's automatic differentiation."""

    layout: TrunkLayout
    weights: Floats  # (P,)
    gradient: Floats | None  # (P,) written at the layout's own places
    observations: Floats  # (L, S, F)
    starts: Bools  # (L, S)
    hidden: Floats  # (layers, S, H)
    cell: Floats
    d_output: Floats  # (L, S, W)
    d_features: Floats | None  # (L, S, D)
    d_x: Floats | None  # (L, S, F) written

    scale: ClassVar[float] = 1.0
    kernel: Any = field(default=None, init=False, repr=False, compare=False)
    kind: ClassVar[str] = "outputs"
