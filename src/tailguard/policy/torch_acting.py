"""Acting of policies that the compiled loops do not know: step by step through the policy's own modules."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.policy.acting import Acting, Step
from tailguard.policy.action_heads import ActionHead
from tailguard.policy.recurrent import State


class TorchActing(Acting):
    """A policy through the steps of a rollout; it keeps the parameters of its action laws.

    step: (observations (n, F), state) -> (parameters (n, P), state after)
    chance: (T, n, A) as `ActionHead.chance` gives it
    """

    def __init__(self, step: Step, head: ActionHead, chance: Tensor) -> None:
        super().__init__(step, head, chance)

    def act(self, t: int, observations: NDArray[np.float32], state: State) -> tuple[NDArray[np.float32], State]:
        parameters, state = self.step(torch.from_numpy(observations).to(self.chance.device), state)
        self.outputs.append(parameters)
        return self.head.sample(parameters, self.chance[t]).numpy(force=True), state

    def parameters(self) -> Tensor:
        return torch.stack(self.outputs)
