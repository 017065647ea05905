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
from tailguard.kernels.networks import trunk_forward
from tailguard.policy.action_heads import HEADS, ActionHead
from tailguard.policy.critics import CategoricalCriticHead, CriticHead, QuantileHead
from tailguard.policy.known import is_chain, is_plain
from tailguard.policy.recurrent import LSTM, Layout, NoMemory, State
from tailguard.policy.trunk import Trunk

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


def trunk_layout(trunk: Trunk, last: nn.Linear, offset: Callable[[Tensor], int]) -> TrunkLayout:
    """Where the weights of a trunk and of the head's last layer lie in a flat vector; `offset` of each parameter."""
    memory, linear = trunk.memory, [*(layer for layer in trunk.layers if isinstance(layer, nn.Linear)), last]
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


def packed_layout(trunk: Trunk, last: nn.Linear) -> tuple[TrunkLayout, list[Tensor]]:
    """The layout of a trunk whose weights lie one after the other, and these weights in that order."""
    parts: list[Tensor] = []

    def next_offset(part: Tensor) -> int:
        parts.append(part)
        return sum(earlier.numel() for earlier in parts[:-1])

    return trunk_layout(trunk, last, next_offset), parts


def loaded_trunk(trunk: Trunk, last: nn.Linear) -> NativeTrunk:
    """The trunk in the native core, with a copy of its weights as they are now."""
    layout, parts = packed_layout(trunk, last)
    loaded = NativeTrunk(layout)
    loaded.load(torch.cat([part.detach().reshape(-1) for part in parts]).numpy())
    return loaded


def sequence_features(trunk: Trunk, head: ActionHead | CriticHead, x: Tensor, state: State, layout: Layout) -> Tensor:
    """What the head reads (L, B, D) when the trunk runs over whole sequences (L, B, F), with gradient.

    An LSTM trunk that the native core knows runs there, forward and backward; `Trunk.forward` defines the result.
    """
    plain = any(is_plain(head, kind) for kind in (*HEADS, QuantileHead, CategoricalCriticHead))
    usable = x.dtype == torch.float32 and x.device.type == "cpu" and not any(part.requires_grad for part in state)
    lstm = plain and usable and layout.extra is None and isinstance(trunk.memory, LSTM)
    if not lstm or why_torch(trunk, head.last_layer) is not None:
        return trunk(x, state, layout).features  # type: ignore[no-any-return]
    place, parts = packed_layout(trunk, head.last_layer)
    weights = torch.cat([part.detach().reshape(-1) for part in parts])
    starts = torch.from_numpy(layout.starts.copy())
    starts[0] = False  # the caller's state counts there
    parameters = [*parts[:-2], parts[-2].detach(), parts[-1].detach()]  # the head itself applies its last layer
    return trunk_forward(place, weights, x, starts, *state, parameters, torch.get_num_threads())[1]


def arrays_of(state: State) -> tuple[Floats, Floats]:
    """Hidden state and cell (layers, N, H) as arrays that share the state's storage."""
    return state.hidden.numpy(), state.cell.numpy()
