"""Exchange of parameters between agents, as in SB3: weights, and everything that weights mean nothing without."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tailguard.checkpoint import read_bundle
from tailguard.errors import CheckpointError, StateError
from tailguard.normalization import ObservationStatistics
from tailguard.ppo.bundle_checks import refuse_unsound, refusing, unchanged_on_error
from tailguard.ppo.live_settings import LiveSettings
from tailguard.stateful import Stateful

OF_THE_WEIGHTS = ("return_scale", "risk", "obs_stats")
"""Parts that say in which units networks see and predict. Dictionaries of earlier versions do not hold them."""
OF_TRAINING = ("optimizer", "gradient_scaler", "kl_penalty")
SB3_NAMES = {"optimizer": "policy.optimizer"}


class ParameterExchange(LiveSettings):
    """`get_parameters` and `set_parameters` on top of the dictionary of parts."""

    obs_stats: ObservationStatistics

    def parts(self) -> dict[str, Stateful]:
        raise NotImplementedError

    def get_parameters(self, include_optimizer: bool = True) -> dict[str, dict[str, Any]]:
        """State by name, as in SB3: of the policy, of the scales it sees and predicts in, and of what trains it.

        Without `include_optimizer`: of the policy and its scales alone.
        """
        named = self.named_parameters()
        left_out = () if include_optimizer else {SB3_NAMES.get(name, name) for name in OF_TRAINING}
        return {name: dict(part.state_dict()) for name, part in named.items() if name not in left_out}

    def named_parameters(self) -> dict[str, Stateful]:
        """The parts that `get_parameters` and `set_parameters` exchange, under SB3's names."""
        chosen = ("policy", *OF_TRAINING, *OF_THE_WEIGHTS)
        return {SB3_NAMES.get(name, name): part for name, part in self.parts().items() if name in chosen}

    def set_parameters(
        self, load_path_or_dict: Any, exact_match: bool = True, device: torch.device | str = "auto"
    ) -> None:
        """Load what `get_parameters` gave, or the same parts of a saved agent. `exact_match` asks for all of them."""
        named = self.named_parameters()
        if isinstance(load_path_or_dict, Mapping):
            states = dict(load_path_or_dict)
        else:
            with refusing(load_path_or_dict, "an agent"):
                saved = dict(read_bundle(load_path_or_dict)[0]["parts"])
            states = {SB3_NAMES.get(name, name): state for name, state in saved.items()}
            states = {name: state for name, state in states.items() if name in named}
        unknown, missing = set(states) - set(named), set(named) - set(states) - set(OF_THE_WEIGHTS)
        if unknown or (exact_match and missing):
            raise StateError(
                f"set_parameters got {sorted(states)}; unknown {sorted(unknown)}, missing {sorted(missing)}. "
                "Pass all of get_parameters(), or exact_match=False for a part of them."
            )
        if self.env is None:
            states.pop("obs_stats", None)  # as in load: there is no normalizer yet
        given = isinstance(load_path_or_dict, Mapping)
        place, kind = ("The state given", StateError) if given else (load_path_or_dict, CheckpointError)
        with refusing(place, "the parameters", kind), unchanged_on_error(self.named_parameters):
            refuse_unsound(states, named, self.config)
            for name, state in states.items():
                named[name].load_state_dict(state)
        if "policy" in states:
            self.warn_of_weights_alone(states)

    def warn_of_weights_alone(self, states: Mapping[str, Any]) -> None:
        """Weights without the scales they go with: this agent's own stay, and say something else of them."""
        acts = {
            "return_scale": self.config.return_scale.enabled,
            "risk": self.config.risk.mode == "episode",
            "obs_stats": self.obs_stats.normalizer is not None,
        }
        raw = states.get("obs_stats") == {"present": False}  # weights that saw observations as they are
        kept = [name for name in OF_THE_WEIGHTS if acts[name] and (name not in states or (raw and name == "obs_stats"))]
        if kept:
            warnings.warn(
                f"The parameters hold no {' and no '.join(kept)}: this agent's own stay, and its values, or what it "
                "sees, are in other units than where the weights come from. Pass all that get_parameters() of this "
                "version gives.",
                stacklevel=3,
            )
