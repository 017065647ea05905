"""The network of the JAX peer: LSTM, two layers, output, as pure functions of their weights."""

from __future__ import annotations

from math import log, pi
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.cases import LAYERS

State = tuple[jax.Array, jax.Array]  # hidden and cell, (B, H) each
Weights = dict[str, Any]


def trunk_weights(key: jax.Array, n_inputs: int, hidden: int, n_outputs: int) -> Weights:
    keys = jax.random.split(key, 6)
    orthogonal = jax.nn.initializers.orthogonal()
    weights: Weights = {
        "input": orthogonal(keys[0], (n_inputs, 4 * hidden)),
        "hidden": orthogonal(keys[1], (hidden, 4 * hidden)),
        "bias": jnp.zeros(4 * hidden),
    }
    widths = [hidden, *LAYERS, n_outputs]
    weights["layers"] = [
        (orthogonal(key, (a, b)), jnp.zeros(b)) for key, a, b in zip(keys[2:], widths, widths[1:], strict=False)
    ]
    return weights


def cell(weights: Weights, projected: jax.Array, state: State) -> State:
    """One step from the input's share of the gates (B, 4H)."""
    gates = projected + state[0] @ weights["hidden"]
    entry, forget, candidate, output = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(entry) * jnp.tanh(candidate)
    return jax.nn.sigmoid(output) * jnp.tanh(c), c


def head(weights: Weights, features: jax.Array) -> jax.Array:
    *inner, (w, b) = weights["layers"]
    for matrix, bias in inner:
        features = jnp.tanh(features @ matrix + bias)
    return features @ w + b


def masked(state: State, starts: jax.Array) -> State:
    """Zero where an episode starts."""
    keep = (1.0 - starts)[:, None]
    return state[0] * keep, state[1] * keep


def step(weights: Weights, obs: jax.Array, state: State, starts: jax.Array) -> tuple[jax.Array, State]:
    """Outputs (B, P) of one step and the state after it."""
    state = cell(weights, obs @ weights["input"] + weights["bias"], masked(state, starts))
    return head(weights, state[0]), state


def unroll(weights: Weights, obs: jax.Array, state: State, starts: jax.Array) -> jax.Array:
    """Outputs (L, B, P) of whole sequences: inputs and layers in one product each, the recurrence in a scan."""
    projected = obs @ weights["input"] + weights["bias"]

    def walk(state: State, now: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
        state = cell(weights, now[0], masked(state, now[1]))
        return state, state[0]

    return head(weights, jax.lax.scan(walk, state, (projected, starts))[1])


def sample(output: jax.Array, log_std: jax.Array | None, key: jax.Array) -> jax.Array:
    """Actions: (B,) of a categorical law, (B, A) of a Gaussian one."""
    if log_std is None:
        return jax.random.categorical(key, output)
    return output + jnp.exp(log_std) * jax.random.normal(key, output.shape)


def log_prob(output: jax.Array, log_std: jax.Array | None, action: jax.Array) -> jax.Array:
    if log_std is None:
        return jnp.take_along_axis(jax.nn.log_softmax(output), action[..., None], -1)[..., 0]
    z = (action - output) / jnp.exp(log_std)
    return -(0.5 * z**2 + log_std + 0.5 * log(2 * pi)).sum(-1)
