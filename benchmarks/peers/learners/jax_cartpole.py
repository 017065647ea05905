"""CartPole without velocities in JAX, so that a rollout can be one compiled program. The physics are Gymnasium's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
LARGEST_X, LARGEST_ANGLE, LIMIT = 2.4, 12 * 2 * jnp.pi / 360, 500


def fresh(key: jax.Array, n: int) -> dict[str, jax.Array]:
    """n environments at their start."""
    return {"x": jax.random.uniform(key, (n, 4), minval=-0.05, maxval=0.05), "clock": jnp.zeros(n, jnp.int32)}


def observe(env: dict[str, jax.Array]) -> jax.Array:
    """(N, 2) position and angle."""
    return env["x"][:, ::2]


def step(
    env: dict[str, jax.Array], action: jax.Array, key: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """The environments after a step, (N,) rewards and ends; an episode that ends starts again at once."""
    x, speed, angle, spin = env["x"].T
    force = jnp.where(action == 1, FORCE, -FORCE)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pushed = (force + POLE * HALF_LENGTH * spin**2 * sin) / (CART + POLE)
    spin_up = (GRAVITY * sin - cos * pushed) / (HALF_LENGTH * (4.0 / 3.0 - POLE * cos**2 / (CART + POLE)))
    speed_up = pushed - POLE * HALF_LENGTH * spin_up * cos / (CART + POLE)
    moved = jnp.stack(
        [x + SECONDS * speed, speed + SECONDS * speed_up, angle + SECONDS * spin, spin + SECONDS * spin_up], 1
    )
    clock = env["clock"] + 1
    over = (jnp.abs(moved[:, 0]) > LARGEST_X) | (jnp.abs(moved[:, 2]) > LARGEST_ANGLE) | (clock >= LIMIT)
    again = fresh(key, len(x))
    after = {"x": jnp.where(over[:, None], again["x"], moved), "clock": jnp.where(over, 0, clock)}
    return after, jnp.ones(len(x)), over
