"""What `contract.json` says of a policy, checked field by field before anything is built from it."""

from __future__ import annotations

from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tailguard_runtime.errors import FrozenPolicyError

FORMAT = "tailguard-frozen-policy"
SCHEMA_VERSION = 1
LARGEST_WIDTH, MOST_RNN_LAYERS, MOST_LAYERS, LARGEST_SHAPE = 2**20, 8, 64, 2**24

Rnn = Literal["lstm", "gru", "none"]
RNNS: tuple[Rnn, ...] = ("lstm", "gru", "none")
ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu", "leaky_relu")
FLOATS = ("float32", "float64", "float16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class Contract(NamedTuple):
    """Shapes and kinds of a policy; `said` is the whole of contract.json."""

    rnn: Rnn
    hidden_size: int
    n_rnn_layers: int
    layers: tuple[int, ...]
    activation: str
    observation_shape: tuple[int, ...]
    normalizer: tuple[float, float] | None
    """Largest normalized value and epsilon, where observations are normalized by moments among the weights."""
    action_kind: str
    action_shape: tuple[int, ...]
    action_dtype: str
    bounds: str
    counts: tuple[int, ...]
    start: tuple[int, ...]
    said: dict[str, Any]

    @property
    def n_features(self) -> int:
        """Numbers in one observation."""
        return prod(self.observation_shape)

    @property
    def n_actions(self) -> int:
        """Numbers in one action."""
        return prod(self.action_shape)

    @property
    def output_width(self) -> int:
        """Of the last layer."""
        return len(self.counts) * max(self.counts) if self.action_kind == "Discrete" else self.n_actions

    def state_shape(self, n: int, part: Literal["hidden", "cell"]) -> tuple[int, int, int]:
        """Of the recurrent state of n environments; a part that the policy does not have is empty."""
        has = self.rnn == "lstm" or (self.rnn == "gru" and part == "hidden")
        return (self.n_rnn_layers, n, self.hidden_size) if has else (0, n, 0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every array of weights.safetensors by its name."""
        found: dict[str, tuple[int, ...]] = {}
        gates = {"lstm": 4, "gru": 3, "none": 0}[self.rnn] * self.hidden_size
        width = self.n_features
        for i in range(self.n_rnn_layers):
            found[f"rnn.{i}.input_weight"] = (gates, width)
            found[f"rnn.{i}.hidden_weight"] = (gates, self.hidden_size)
            found[f"rnn.{i}.bias"] = (gates,)
            width = self.hidden_size
        for i, n_units in enumerate(self.layers):
            found[f"layers.{i}.weight"], found[f"layers.{i}.bias"] = (n_units, width), (n_units,)
            width = n_units
        found["head.weight"], found["head.bias"] = (self.output_width, width), (self.output_width,)
        if self.action_kind == "Box":
            found["action.low"] = found["action.high"] = self.action_shape
        if self.normalizer is not None:
            found["normalizer.mean"] = found["normalizer.var"] = self.observation_shape
        return found


def parse_contract(said: dict[str, Any], path: Path) -> Contract:
    """The contract of a folder, or a refusal that names what is wrong."""
    if said.get("format") != FORMAT:
        raise FrozenPolicyError(f"{path} is no contract of a frozen policy: its format is {said.get('format')!r}.")
    if said.get("schema_version") != SCHEMA_VERSION:
        raise FrozenPolicyError(
            f"{path} has schema version {said.get('schema_version')!r}, this version of tailguard-runtime reads "
            f"{SCHEMA_VERSION}. Export the policy again, or install the version that belongs to it."
        )
    try:
        return checked(said)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise FrozenPolicyError(f"{path} describes no policy: {what}.") from None


def checked(said: dict[str, Any]) -> Contract:
    """Every field of its type and within its bounds."""
    policy, observation, action = said["policy"], said["observation"], said["action"]
    rnn = one_of(policy, "rnn", RNNS)
    normalizer = observation["normalizer"]
    kind = one_of(action, "kind", ("Box", "Discrete", "MultiBinary"))
    shape = integers(action, "shape", 0, LARGEST_WIDTH, 32)
    counts = integers(action, "counts", 1, LARGEST_WIDTH, LARGEST_WIDTH) if kind == "Discrete" else ()
    start = integers(action, "start", -(2**62), 2**62, LARGEST_WIDTH) if kind == "Discrete" else ()
    observed = integers(observation, "shape", 1, LARGEST_SHAPE, 32)
    if not 0 < prod(shape) <= LARGEST_WIDTH or prod(observed) > LARGEST_SHAPE:
        raise ValueError(f"the shapes {list(observed)} of observations and {list(shape)} of actions are out of bounds")
    if kind == "Discrete" and not len(counts) == len(start) == prod(shape):
        raise ValueError("action.counts and action.start must have a number per choice")
    if kind == "Discrete" and len(counts) * max(counts) > LARGEST_WIDTH:
        raise ValueError("action.counts are out of bounds")
    return Contract(
        rnn=rnn,
        hidden_size=0 if rnn == "none" else whole(policy, "hidden_size", 1, LARGEST_WIDTH),
        n_rnn_layers=0 if rnn == "none" else whole(policy, "n_rnn_layers", 1, MOST_RNN_LAYERS),
        layers=integers(policy, "layers", 1, LARGEST_WIDTH, MOST_LAYERS),
        activation=one_of(policy, "activation", ACTIVATIONS),
        observation_shape=observed,
        normalizer=None if normalizer is None else (number(normalizer, "clip"), number(normalizer, "epsilon")),
        action_kind=kind,
        action_shape=shape,
        action_dtype=one_of(action, "dtype", (*FLOATS, *INTEGERS)),
        bounds=one_of(action, "bounds", ("clip", "squash")) if kind == "Box" else "",
        counts=counts,
        start=start,
        said=said,
    )


def one_of(values: dict[str, Any], name: str, known: tuple[Any, ...]) -> Any:
    if values[name] not in known:
        raise ValueError(f"{name} is {str(values[name])[:60]!r}, expected one of {', '.join(known)}")
    return values[name]


def whole(values: dict[str, Any], name: str, least: int, most: int) -> int:
    found = values[name]
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"{name} is {str(found)[:60]!r}, expected a whole number from {least} to {most}")
    return found


def integers(values: dict[str, Any], name: str, least: int, most: int, longest: int) -> tuple[int, ...]:
    found = values[name]
    if not isinstance(found, list) or len(found) > longest:
        raise ValueError(f"{name} must be a list of at most {longest:,} whole numbers")
    return tuple(whole({name: item}, name, least, most) for item in found)


def number(values: dict[str, Any], name: str) -> float:
    found = values[name]
    if type(found) not in (int, float) or not isfinite(found) or found <= 0:
        raise ValueError(f"{name} is {str(found)[:60]!r}, expected a positive number")
    return float(found)
