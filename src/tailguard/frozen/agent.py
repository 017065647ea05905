"""What a frozen policy keeps of an agent: the actor's weights, its moments of observations, and a test vector.

`tailguard_runtime` is the other end of the format: `contract.py` there names every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from tailguard.errors import ConfigError
from tailguard.policy.action_heads import HEADS
from tailguard.policy.config import ACTIVATIONS
from tailguard.policy.known import is_plain
from tailguard.policy.policy import RecurrentPolicy
from tailguard.policy.recurrent import GRU, LSTM, GatedMemory, NoMemory
from tailguard.policy.trunk import Trunk

Arrays = dict[str, NDArray[Any]]

N_STEPS, N_ENVS = 16, 2
"""Of the test vector; an episode starts in its middle."""


def refuse_own_classes(policy: RecurrentPolicy) -> None:
    """A frozen policy is run by other code: a class or a hook of the user's own would be left out of it."""
    actor, config = policy.actor, policy.config
    rnn: type[nn.Module] = {"lstm": LSTM, "gru": GRU, "none": NoMemory}[config.memory]
    layers = list(actor.layers)
    activation = repr(ACTIVATIONS[config.activation_fn]())
    plain = {
        "policy": is_plain(policy, RecurrentPolicy),
        "policy.actor": is_plain(actor, Trunk) and is_plain(actor.layers, nn.Sequential),
        "policy.actor.memory": is_plain(actor.memory, rnn),
        "policy.actor.layers": all(is_plain(layer, nn.Linear) and layer.bias is not None for layer in layers[::2])
        and all(repr(layer) == activation and is_plain(layer, type(layer)) for layer in layers[1::2]),
        "policy.action_head": any(is_plain(policy.action_head, kind) for kind in HEADS)
        and is_plain(policy.action_head.last_layer, nn.Linear),
    }
    other = [name for name, known in plain.items() if not known]
    if other:
        raise ConfigError(
            f"{other[0]} is of a class of your own, or hooked, or a part of it was replaced: a frozen policy holds "
            "weights and no code, so it would decide otherwise. Export agents of the package's own policies."
        )


def linear_layers(trunk: Trunk) -> list[nn.Linear]:
    """The linear layers between the memory and the head."""
    return [layer for layer in trunk.layers if isinstance(layer, nn.Linear)]


def describe(policy: RecurrentPolicy, moments: Mapping[str, Any], names: tuple[str, ...] | None) -> dict[str, Any]:
    """The parts `policy`, `observation` and `action` of a contract.

    moments: the state of `ObservationStatistics`; names: of the numbers of an observation, where they have names
    """
    config, actor = policy.config, policy.actor
    normalizer = {"clip": moments["clip_obs"], "epsilon": moments["epsilon"]} if moments["present"] else None
    return {
        "policy": {
            "rnn": config.memory,
            "hidden_size": actor.memory.out_features if config.memory != "none" else 0,
            "n_rnn_layers": actor.memory.n_layers,
            "layers": [layer.out_features for layer in linear_layers(actor)],
            "activation": config.activation_fn,
        },
        "observation": {
            "shape": list(policy.observation_space.shape or ()),
            "names": None if names is None else list(names),
            "normalizer": normalizer,
        },
        "action": describe_actions(policy.action_space, config.action_bounds),
    }


def describe_actions(space: spaces.Space[Any], bounds: str) -> dict[str, Any]:
    """Kind, shape and type of actions; choices have their number and their first one."""
    said: dict[str, Any] = {"shape": list(space.shape or ()), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Box):
        return {"kind": "Box", "bounds": bounds, **said}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", **said}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "counts": [int(space.n)], "start": [int(space.start)], **said}
    if isinstance(space, spaces.MultiDiscrete):
        counts, start = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        return {"kind": "Discrete", "counts": counts, "start": start, **said}
    raise ConfigError(f"The action space {space} cannot be exported.")


def weights_of(policy: RecurrentPolicy, moments: Mapping[str, Any]) -> Arrays:
    """The actor's arrays by name; bounds of actions and moments of observations in float64."""
    rnn = policy.actor.memory
    found: dict[str, torch.Tensor] = {}
    if isinstance(rnn, GatedMemory):
        for i in range(rnn.n_layers):
            found[f"rnn.{i}.input_weight"] = rnn.input_weight[i]
            found[f"rnn.{i}.hidden_weight"] = rnn.hidden_weight[i]
            found[f"rnn.{i}.bias"] = rnn.bias[i]
    for i, layer in enumerate(linear_layers(policy.actor)):
        found[f"layers.{i}.weight"], found[f"layers.{i}.bias"] = layer.weight, layer.bias
    last = policy.action_head.last_layer
    found["head.weight"], found["head.bias"] = last.weight, last.bias
    arrays: Arrays = {
        name: np.ascontiguousarray(tensor.numpy(force=True), np.float32) for name, tensor in found.items()
    }
    if isinstance(policy.action_space, spaces.Box):
        arrays["action.low"] = policy.action_space.low.astype(np.float64)
        arrays["action.high"] = policy.action_space.high.astype(np.float64)
    if moments["present"]:
        arrays["normalizer.mean"] = np.asarray(moments["mean"], np.float64)
        arrays["normalizer.var"] = np.asarray(moments["var"], np.float64)
    unsound = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if unsound:
        raise ConfigError(f"{unsound[0]} of the agent holds NaN or infinity, so it cannot be used. Export another one.")
    return arrays


def normalized(raw: NDArray[Any], moments: Mapping[str, Any]) -> NDArray[Any]:
    """Observations as VecNormalize hands them to the agent."""
    if not moments["present"]:
        return raw
    mean, deviation = np.asarray(moments["mean"]), np.sqrt(np.asarray(moments["var"]) + moments["epsilon"])
    seen: NDArray[np.float32] = (
        ((raw - mean) / deviation).clip(-moments["clip_obs"], moments["clip_obs"]).astype(np.float32)
    )
    return seen


@torch.no_grad()
def make_test_vector(policy: RecurrentPolicy, moments: Mapping[str, Any]) -> Arrays:
    """Raw observations of a few steps, and what the agent makes of them.

    observations (T, N, ...), starts (T, N), outputs (T, N, P) of the last layer, actions (T, N, ...), and after each
    step hidden and cell (T, layers, N, H) of the actor
    """
    rng, shape = np.random.default_rng(0), (N_STEPS, N_ENVS, *(policy.observation_space.shape or ()))
    drawn = rng.normal(size=shape)
    if moments["present"]:
        drawn = moments["mean"] + np.sqrt(moments["var"] + moments["epsilon"]) * drawn
    observations = drawn.astype(np.float32)
    if isinstance(policy.observation_space, spaces.Box):  # it always is
        observations = observations.clip(policy.observation_space.low, policy.observation_space.high).astype(np.float32)
    starts = np.zeros((N_STEPS, N_ENVS), np.bool_)
    starts[N_STEPS // 2, 0] = True
    n_layers = policy.actor.memory.n_layers
    state: Any = None
    rows: dict[str, list[NDArray[Any]]] = {name: [] for name in ("outputs", "actions", "hidden", "cell")}
    for seen, start in zip(normalized(observations, moments), starts, strict=True):
        before = policy.states_from(state, start, N_ENVS)[0]
        features, _ = policy.actor(policy.flat(seen), before)
        action, state = policy.predict(seen, state, start, deterministic=True)
        rows["outputs"].append(policy.action_head.last_layer(features).numpy(force=True))
        rows["actions"].append(action)
        rows["hidden"].append(state[0][:n_layers])
        rows["cell"].append(state[1][: n_layers if policy.config.memory == "lstm" else 0])
    actions = np.stack(rows.pop("actions"))
    kept = actions.astype(np.float64 if actions.dtype.kind == "f" else np.int64)
    return {
        "observations": observations,
        "starts": starts,
        "actions": kept,
        **{name: np.ascontiguousarray(np.stack(values), np.float32) for name, values in rows.items()},
    }
