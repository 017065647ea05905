"""Advantages and the update of the JAX peer as pure functions: everything between two rollouts is one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.learners.cycle import CLIP, GAMMA, LAMBDA, MAX_NORM, RATE, VF_COEF
from benchmarks.peers.learners.jax_networks import Weights, log_prob, unroll

BETAS, EPSILON = (0.9, 0.999), 1e-5
Batch = dict[str, Any]


def advantages_of(
    rewards: jax.Array, values: jax.Array, ends: jax.Array, last_value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantages and returns, (T, N) each."""

    def back(carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        trace, next_value = carry
        reward, value, end = now
        trace = reward + GAMMA * (1.0 - end) * (next_value + LAMBDA * trace) - value
        return (trace, value), trace

    start = (jnp.zeros_like(last_value), last_value)
    _, advantages = jax.lax.scan(back, start, (rewards, values, ends), reverse=True)
    return advantages, advantages + values


def loss(weights: Weights, batch: Batch) -> jax.Array:
    """Clipped surrogate and squared value error on sequences (L, B)."""
    output = unroll(weights["actor"], batch["obs"], batch["actor"], batch["starts"])
    value = unroll(weights["critic"], batch["obs"], batch["critic"], batch["starts"])[..., 0]
    ratio = jnp.exp(log_prob(output, weights["log_std"], batch["actions"]) - batch["log_probs"])
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    surrogate = jnp.minimum(advantages * ratio, advantages * jnp.clip(ratio, 1 - CLIP, 1 + CLIP)).mean()
    return VF_COEF * jnp.square(value - batch["returns"]).mean() - surrogate


def fresh_moments(weights: Weights) -> dict[str, Any]:
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return {"first": zeros, "second": zeros, "count": jnp.zeros((), jnp.int32)}


def adam(weights: Weights, gradient: Weights, moments: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    """Clip to the norm, then one step of Adam."""
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), gradient)
    count = moments["count"] + 1
    first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, moments["first"], gradient)
    second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, moments["second"], gradient)
    unbias = [1 - beta**count for beta in BETAS]

    def move(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return w - RATE * (m / unbias[0]) / (jnp.sqrt(v / unbias[1]) + EPSILON)

    return jax.tree.map(move, weights, first, second), {"first": first, "second": second, "count": count}


def update(
    weights: Weights,
    moments: dict[str, Any],
    sequences: Batch,
    key: jax.Array,
    *,
    epochs: int,
    per_batch: int,
    batches: int,
) -> tuple[Weights, dict[str, Any]]:
    """Epochs over some shuffled batches of sequences; axis 1 of (L, S, ...) arrays, axis 0 of states."""
    n_sequences = sequences["obs"].shape[1]

    def select(chosen: jax.Array) -> Batch:
        states = {k: jax.tree.map(lambda s: s[chosen], sequences[k]) for k in ("actor", "critic")}
        return {**{k: v[:, chosen] for k, v in sequences.items() if k not in states}, **states}

    def descend(carry: tuple[Weights, Any], chosen: jax.Array) -> tuple[tuple[Weights, Any], None]:
        weights, moments = carry
        return adam(weights, jax.grad(loss)(weights, select(chosen)), moments), None

    def epoch(carry: tuple[Weights, Any], key: jax.Array) -> tuple[tuple[Weights, Any], None]:
        chosen = jax.random.permutation(key, n_sequences)[: batches * per_batch]
        return jax.lax.scan(descend, carry, chosen.reshape(batches, -1))

    return jax.lax.scan(epoch, (weights, moments), jax.random.split(key, epochs))[0]


def cut(array: jax.Array, length: int) -> jax.Array:
    """(T, N, ...) to (L, S, ...), sequences chunk by chunk."""
    n_chunks, n_envs = array.shape[0] // length, array.shape[1]
    chunks = array.reshape(n_chunks, length, n_envs, *array.shape[2:]).swapaxes(0, 1)
    return chunks.reshape(length, n_chunks * n_envs, *array.shape[2:])
