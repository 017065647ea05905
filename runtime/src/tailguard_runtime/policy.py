"""A frozen policy: observations and recurrent state in, deterministic actions and the state after them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailguard_runtime.contract import Contract, parse_contract
from tailguard_runtime.errors import FrozenPolicyError
from tailguard_runtime.folder import CONTRACT, TEST_VECTOR, WEIGHTS, Arrays, parse_arrays, parse_json, read_folder
from tailguard_runtime.network import Array, Gates, Network, State, Wide

TOLERANCE = 1e-4
"""Of the test vector, relative to its largest value: rounding differs between machines, another policy by more."""
MOST_STEPS, MOST_ENVS = 4_096, 64


class FrozenPolicy:
    """A policy as `tailguard export` wrote it; read it with `FrozenPolicy.load(folder)`."""

    def __init__(self, contract: Contract, weights: Arrays) -> None:
        self.layout = contract
        refuse_misfit(contract, weights)
        self.network = network_of(contract, weights)
        if contract.action_kind == "Box":
            low, high = weights["action.low"], weights["action.high"]
            self.low, self.high = (bound.astype(contract.action_dtype) for bound in (low, high))
            self.centre, self.half_width = (high.reshape(-1) + low.reshape(-1)) / 2, (high - low).reshape(-1) / 2
        if contract.action_kind == "Discrete":
            width = max(contract.counts)
            self.forbidden = np.arange(width) >= np.array(contract.counts)[:, None]
            self.start = np.array(contract.start, np.int64)
        if contract.normalizer is not None:
            self.largest, epsilon = contract.normalizer
            self.mean, self.scale = weights["normalizer.mean"], np.sqrt(weights["normalizer.var"] + epsilon)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The policy of a folder, after its checksums were compared and its test vector was run."""
        place, files = read_folder(folder)
        contract = parse_contract(parse_json(files[CONTRACT], place / CONTRACT), place / CONTRACT)
        try:
            policy = cls(contract, parse_arrays(files[WEIGHTS], place / WEIGHTS))
            policy.verify(parse_arrays(files[TEST_VECTOR], place / TEST_VECTOR))
        except FrozenPolicyError as error:
            raise FrozenPolicyError(f"{place}: {error}") from None
        return policy

    @property
    def contract(self) -> dict[str, Any]:
        """What contract.json says: the policy, its observations and actions, the market, and where it comes from."""
        return self.layout.said

    def initial_state(self, n: int = 1) -> State:
        """Zero state of n environments."""
        hidden, cell = self.layout.state_shape(n, "hidden"), self.layout.state_shape(n, "cell")
        return State(np.zeros(hidden, np.float32), np.zeros(cell, np.float32))

    def step(
        self, observation: ArrayLike, state: State | None = None, episode_start: ArrayLike | None = None
    ) -> tuple[NDArray[Any], State]:
        """Actions for raw observations (n, ...) or for a single one, and the state after them.

        state:         what the last step returned; None begins with zeros
        episode_start: (n,) True where an episode starts, which zeroes the state there
        """
        seen, single = self.batched(observation)
        before = self.checked_state(state, len(seen))
        if episode_start is not None:
            starts = np.asarray(episode_start, dtype=bool).reshape(-1)
            if starts.shape != (len(seen),):
                raise FrozenPolicyError(f"episode_start has shape {starts.shape}; expected ({len(seen)},).")
            before = before.keep(starts)
        output, after = self.network.step(self.normalized(seen), before)
        actions = self.actions(output)
        return (actions[0] if single else actions), after

    def batched(self, observation: ArrayLike) -> tuple[NDArray[Any], bool]:
        """Observations (n, ...), and whether a single one was given."""
        seen, shape = np.asarray(observation), self.layout.observation_shape
        single = seen.shape == shape
        if not single and (seen.shape[1:] != shape or seen.ndim != len(shape) + 1):
            raise FrozenPolicyError(f"The observation has shape {seen.shape}; expected {shape} or (n, *{shape}).")
        if not np.isfinite(seen).all():
            raise FrozenPolicyError(
                "The observation holds NaN or infinity. Decide nothing on it, or repair its source."
            )
        return (seen[None] if single else seen), single

    def normalized(self, seen: NDArray[Any]) -> Array:
        """What the network takes, (n, F), of raw observations (n, ...)."""
        if self.layout.normalizer is not None:
            seen = np.clip((seen - self.mean) / self.scale, -self.largest, self.largest)
        return seen.astype(np.float32).reshape(len(seen), -1)

    def checked_state(self, state: State | None, n: int) -> State:
        """The state of n environments; zeros where none is given."""
        fresh = self.initial_state(n)
        if state is None:
            return fresh
        hidden, cell = (np.asarray(part, dtype=np.float32) for part in state)
        if hidden.shape != fresh.hidden.shape or cell.shape != fresh.cell.shape:
            raise FrozenPolicyError(
                f"The state has shapes {hidden.shape} and {cell.shape}; expected {fresh.hidden.shape} and "
                f"{fresh.cell.shape}. Pass what step returned, or None."
            )
        return State(hidden, cell)

    def actions(self, output: Array) -> NDArray[Any]:
        """Deterministic actions (n, ...) of the last layer's output (n, P)."""
        contract = self.layout
        shape = (len(output), *contract.action_shape)
        if contract.action_kind == "Box":
            wide = output.astype(np.float64)
            unit = np.tanh(wide) if contract.bounds == "squash" else wide.clip(-1.0, 1.0)
            raw = (self.centre + self.half_width * unit).reshape(shape)
            bounded: NDArray[Any] = raw.astype(contract.action_dtype).clip(self.low, self.high)
            return bounded
        if contract.action_kind == "Discrete":
            logits = output.reshape(len(output), *self.forbidden.shape)
            chosen: NDArray[np.int64] = np.where(self.forbidden, -np.inf, logits).argmax(-1) + self.start
            return chosen.reshape(shape)
        return (output > 0).astype(np.int8).reshape(shape)

    def verify(self, vector: Arrays) -> None:
        """Refuse a policy that does not make of the test vector what the agent made of it."""
        try:
            observations, starts = vector["observations"], vector["starts"]
            states = list(zip(vector["hidden"], vector["cell"], strict=True))
            if not 0 < len(observations) <= MOST_STEPS or not 0 < starts.shape[1] <= MOST_ENVS:
                raise ValueError("it holds no step, or too many")
            steps = list(zip(observations, starts, vector["outputs"], vector["actions"], states, strict=True))
            state = self.initial_state(starts.shape[1])
            for seen, start, output, action, (hidden, cell) in steps:
                found, state = self.network.step(self.normalized(self.batched(seen)[0]), state.keep(start))
                fits = close(found, output) and close(state.hidden, hidden) and close(state.cell, cell)
                if not fits or not close(self.actions(output), action):
                    raise FrozenPolicyError(
                        "The policy does not decide as the agent did in its test vector, so it is not used. Export it "
                        "again with the version of tailguard that belongs to this runtime."
                    )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, FrozenPolicyError):
                raise
            raise FrozenPolicyError(f"{TEST_VECTOR} does not fit the contract: {error}.") from None


def close(found: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Whether two arrays of one shape agree within the tolerance."""
    if found.shape != expected.shape:
        return False
    wide = expected.astype(np.float64)
    return bool((np.abs(found - wide) <= TOLERANCE * np.maximum(np.abs(wide).max(initial=1.0), 1.0)).all())


def refuse_misfit(contract: Contract, weights: Arrays) -> None:
    """Weights must be the arrays that the contract describes, and finite."""
    expected = contract.shapes()
    if set(weights) != set(expected):
        other = sorted(set(weights) ^ set(expected))[:3]
        raise FrozenPolicyError(f"{WEIGHTS} does not hold the arrays of the contract: {', '.join(other)}.")
    for name, shape in expected.items():
        array, wide = weights[name], name.startswith(("action.", "normalizer."))
        if array.shape != shape or array.dtype != (np.float64 if wide else np.float32):
            raise FrozenPolicyError(
                f"{WEIGHTS}: {name!r} is {array.dtype} of shape {array.shape}; the contract needs {shape}."
            )
        if not np.isfinite(array).all():
            raise FrozenPolicyError(f"{WEIGHTS}: {name!r} holds NaN or infinity.")
    if contract.normalizer is not None and (weights["normalizer.var"] < 0).any():
        raise FrozenPolicyError(f"{WEIGHTS}: 'normalizer.var' holds a negative variance.")


def network_of(contract: Contract, weights: Arrays) -> Network:
    """The network with its weights in float64, transposed, so that a step multiplies from the right."""

    def wide(name: str) -> Wide:
        return np.ascontiguousarray(weights[name].T, np.float64)

    names = [f"rnn.{i}" for i in range(contract.n_rnn_layers)]
    parts = ("input_weight", "hidden_weight", "bias")
    gates = tuple(Gates(*(wide(f"{name}.{part}") for part in parts)) for name in names)
    layers = tuple((wide(f"layers.{i}.weight"), wide(f"layers.{i}.bias")) for i in range(len(contract.layers)))
    return Network(contract.rnn, gates, layers, contract.activation, (wide("head.weight"), wide("head.bias")))
