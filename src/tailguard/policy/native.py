"""The networks as the native core knows them: which it knows, where their weights lie, and what runs through torch.

The core reads a trunk (LSTM layers, linear layers with tanh or ReLU, the head's linear layer) as arrays. Everything
else goes through torch: a GRU, another activation, another device or type, a hook, a subclass, a replaced module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.kernels import native, status
from tailguard.kernels.layout import TrunkLayout
from tailguard.kernels.networks import Trunk as NativeTrunk
from tailguard.policy.action_heads import HEADS
from tailguard.policy.critics import QuantileHead
from tailguard.policy.known import is_chain, is_plain, replaced
from tailguard.policy.observation_mask import ObservationMask
from tailguard.policy.policy import Critic, RecurrentPolicy, Trunk
from tailguard.policy.recurrent import LSTM, NoMemory, State

NATIVE_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
Floats = NDArray[np.float32]


def why_torch(trunk: Trunk, last: nn.Linear) -> str | None:
    """Why the native core cannot read a trunk and the head's last layer; None where it can."""
    if native() is None:
        return status()
    memory = trunk.memory
    if not is_plain(trunk, Trunk) or not (
        is_plain(memory, NoMemory) or (isinstance(memory, LSTM) and memory.is_known())
    ):
        return f"{type(memory).__name__} is not known to the native core, or replaced, hooked or not float32 on the CPU"
    chains = (is_chain(trunk.layers, kind, memory.out_features, last) for kind in NATIVE_ACTIVATIONS.values())
    return (
        None if any(chains) else "layers are not linear ones with tanh or ReLU, or replaced, hooked or not on the CPU"
    )


def why_torch_acts(policy: RecurrentPolicy) -> str | None:
    """Why acting goes through torch; None where the native core steps the actor."""
    head = policy.action_head
    if replaced(policy, RecurrentPolicy, ("action_parameters", "action_step")):
        return f"{type(policy).__name__} has methods of its own"
    if not any(is_plain(head, kind) for kind in HEADS):
        return f"{type(head).__name__} is not one of the package's, or hooked"
    return why_torch(policy.actor, head.last_layer)


def why_torch_evaluates(critic: Critic) -> str | None:
    """Why a critic's predictions go through torch; None where the native core makes them."""
    if not is_plain(critic, Critic) or not is_plain(critic.head, QuantileHead):
        return f"a critic's {type(critic.head).__name__} is not a plain quantile head, or hooked"
    if not any(is_plain(critic.mask, kind) for kind in (nn.Identity, ObservationMask)):
        return "what a critic sees goes through a module that was replaced or hooked"
    return why_torch(critic.trunk, critic.head.last_layer)


def trunk_layout(trunk: Trunk, last: nn.Linear, offset: Callable[[Tensor], int]) -> TrunkLayout:
    """Where the weights of a trunk and of the head's last layer lie in a flat vector; `offset` of each parameter."""
    memory, linear = trunk.memory, [*trunk.linear, last]
    recurrent: list[tuple[int, int, int]] = []
    if isinstance(memory, LSTM):
        parts = zip(memory.input_weight, memory.hidden_weight, memory.bias, strict=True)
        recurrent = [(offset(entry), offset(hidden), offset(bias)) for entry, hidden, bias in parts]
    activations = [name for name, kind in NATIVE_ACTIVATIONS.items() for layer in trunk.layers if type(layer) is kind]
    return TrunkLayout(
        n_inputs=memory.input_weight[0].shape[1] if isinstance(memory, LSTM) else linear[0].in_features,
        n_units=memory.out_features if isinstance(memory, LSTM) else 0,
        recurrent=tuple(recurrent),
        dense=tuple((offset(f.weight), offset(f.bias), f.out_features, f.in_features) for f in linear),
        activation=activations[0] if activations else "tanh",
    )


def loaded_trunk(trunk: Trunk, last: nn.Linear) -> NativeTrunk:
    """The trunk in the native core, with a copy of its weights as they are now."""
    parameters = [*trunk.parameters(), *last.parameters()]
    offsets = dict(zip(map(id, parameters), np.cumsum([0, *(p.numel() for p in parameters)]).tolist(), strict=False))
    loaded = NativeTrunk(trunk_layout(trunk, last, lambda parameter: offsets[id(parameter)]))
    loaded.load(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).numpy())
    return loaded


def arrays_of(state: State) -> tuple[Floats, Floats]:
    """Hidden state and cell (layers, N, H) as arrays that share the state's storage."""
    return state.hidden.numpy(), state.cell.numpy()
