"""Every random stream of an agent, from one root seed; all of it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tailguard.errors import ConfigError, StateError
from tailguard.stateful import require_keys


class Randomness:
    """Independent generators for actions, minibatches, critic targets, an optimizer's noise and an adversary."""

    def __init__(self, seed: int | None) -> None:
        if seed is not None and not 0 <= int(seed) < 2**32:
            raise ConfigError(
                f"seed={seed}: numpy's global generator takes seeds from 0 to {2**32 - 1}. Use one of them."
            )
        self.root = int(np.random.SeedSequence().entropy) % 2**31 if seed is None else int(seed)  # type: ignore[arg-type]
        actions, batches, targets, noise, adversary = np.random.SeedSequence(self.root).spawn(5)
        self.actions = torch_generator(actions)
        self.noise = torch_generator(noise)  # lives in the optimizer, which saves it
        self.adversary = torch_generator(adversary)  # lives in the adversary, which saves it
        self.batches = np.random.default_rng(batches)
        self.targets = np.random.default_rng(targets)

    def state_dict(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "actions": self.actions.get_state(),
            "batches": self.batches.bit_generator.state,
            "targets": self.targets.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        if not 0 <= int(state["root"]) < 2**32:
            raise StateError(f"The seed is {state['root']}: seeds are from 0 to {2**32 - 1}.")
        self.root = int(state["root"])
        self.actions.set_state(state["actions"])
        self.batches.bit_generator.state = state["batches"]
        self.targets.bit_generator.state = state["targets"]


def torch_generator(seed: np.random.SeedSequence) -> torch.Generator:
    """A torch generator from numpy's seed."""
    return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
