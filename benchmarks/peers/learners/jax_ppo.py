"""A recurrent PPO in JAX: the whole rollout of CartPole is one compiled program, the whole update another.

Rollouts are cut into sequences with the state stored at their start, and batches are made of sequences. The trading
environment is no JAX program, so there it is stepped from the host, with one compiled call per step.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from benchmarks.peers.cases import Case, Work
from benchmarks.peers.learners import jax_cartpole
from benchmarks.peers.learners.cycle import Cycle
from benchmarks.peers.learners.jax_networks import State, Weights, log_prob, sample, step, trunk_weights
from benchmarks.peers.learners.jax_update import advantages_of, cut, fresh_moments, update

Live = dict[str, Any]  # memories of actor and critic, starts of episodes, and the environments where JAX holds them


def make(case: Case, env: Any, work: Work, threads: int) -> JittedPPO | HostedPPO:
    """XLA takes a thread per core it may run on, when it is first used; so the process is given that many cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    return (JittedPPO if case.env == "cartpole" else HostedPPO)(case, env, work)


def initial_weights(key: jax.Array, hidden: int, env: Any) -> Weights:
    n_inputs, space = env.observation_space.shape[0], env.action_space
    discrete = isinstance(space, spaces.Discrete)
    n_outputs = int(space.n) if discrete else space.shape[0]
    actor, critic = jax.random.split(key)
    return {
        "actor": trunk_weights(actor, n_inputs, hidden, n_outputs),
        "critic": trunk_weights(critic, n_inputs, hidden, 1),
        "log_std": None if discrete else jnp.zeros(n_outputs),
    }


def act(weights: Weights, live: Live, obs: jax.Array, key: jax.Array) -> tuple[Live, dict[str, jax.Array]]:
    """One step of actor and critic: their memories after it, and what the update needs to know."""
    output, actor = step(weights["actor"], obs, live["actor"], live["starts"])
    value, critic = step(weights["critic"], obs, live["critic"], live["starts"])
    action = sample(output, weights["log_std"], key)
    seen = {
        "obs": obs,
        "actions": action,
        "log_probs": log_prob(output, weights["log_std"], action),
        "starts": live["starts"],
        "values": value[:, 0],
    }
    return {**live, "actor": actor, "critic": critic}, seen


def sequences_of(rows: dict[str, jax.Array], before: dict[str, State], last_value: jax.Array, length: int) -> Any:
    """Rows (T, N, ...) and states (chunks, N, H) before each chunk, as sequences with their advantages."""
    advantages, returns = advantages_of(rows["rewards"], rows["values"], rows["ends"], last_value)
    kept = {k: rows[k] for k in ("obs", "actions", "log_probs", "starts")}
    batch = {k: cut(v, length) for k, v in {**kept, "advantages": advantages, "returns": returns}.items()}
    return {**batch, **jax.tree.map(lambda s: s.reshape(-1, s.shape[-1]), before)}


def rollout(weights: Weights, live: Live, key: jax.Array, *, n_steps: int, length: int) -> tuple[Live, Any]:
    """A whole rollout of CartPole; the sequences of the update."""

    def one(live: Live, key: jax.Array) -> tuple[Live, dict[str, jax.Array]]:
        for_action, for_env = jax.random.split(key)
        live, seen = act(weights, live, jax_cartpole.observe(live["env"]), for_action)
        env, reward, over = jax_cartpole.step(live["env"], seen["actions"], for_env)
        ends = over.astype(jnp.float32)
        return {**live, "env": env, "starts": ends}, {**seen, "rewards": reward, "ends": ends}

    def chunk(live: Live, keys: jax.Array) -> tuple[Live, tuple[Any, Any]]:
        after, rows = jax.lax.scan(one, live, keys)
        return after, ({k: live[k] for k in ("actor", "critic")}, rows)

    for_steps, for_last = jax.random.split(key)
    live, (before, rows) = jax.lax.scan(chunk, live, jax.random.split(for_steps, (n_steps // length, length)))
    rows = {k: v.reshape(n_steps, *v.shape[2:]) for k, v in rows.items()}
    _, last = act(weights, live, jax_cartpole.observe(live["env"]), for_last)
    return live, sequences_of(rows, before, last["values"], length)


class Compiled(Cycle):
    """Weights and their compiled update; a subclass collects."""

    def __init__(self, case: Case, env: Any, work: Work) -> None:
        self.case, self.env, self.key = case, env, jax.random.key(0)
        self.weights = initial_weights(self.next_key(), case.hidden, env)
        self.moments = fresh_moments(self.weights)
        state = jnp.zeros((case.n_envs, case.hidden)), jnp.zeros((case.n_envs, case.hidden))
        self.live: Live = {"actor": state, "critic": state, "starts": jnp.zeros(case.n_envs)}
        self.start()
        self.collect_rollouts()  # compiles, and gives the update its shapes
        sizes = {"per_batch": max(1, case.batch // case.sequence), "batches": work.batches(case.batch)}
        learn = jax.jit(partial(update, epochs=work.epochs, **sizes))
        self.update = learn.lower(self.weights, self.moments, self.sequences, self.next_key()).compile()

    def next_key(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key

    def start(self) -> None:
        raise NotImplementedError

    def train(self) -> None:
        after = self.update(self.weights, self.moments, self.sequences, self.next_key())
        self.weights, self.moments = jax.block_until_ready(after)


class JittedPPO(Compiled):
    """Environments inside the compiled program."""

    def start(self) -> None:
        self.live["env"] = jax_cartpole.fresh(self.next_key(), self.case.n_envs)
        self.rollout = jax.jit(partial(rollout, n_steps=self.case.n_steps, length=self.case.sequence))

    def collect_rollouts(self) -> None:
        self.live, self.sequences = jax.block_until_ready(self.rollout(self.weights, self.live, self.next_key()))


class HostedPPO(Compiled):
    """Environments on the host: one compiled call and one step of the environments after the other."""

    def start(self) -> None:
        self.obs = self.env.reset()
        self.act, self.finish = jax.jit(self.act_with_key), jax.jit(partial(sequences_of, length=self.case.sequence))

    @staticmethod
    def act_with_key(weights: Weights, live: Live, obs: jax.Array, key: jax.Array) -> Any:
        after, now = jax.random.split(key)
        return *act(weights, live, obs, now), after

    def collect_rollouts(self) -> None:
        rows, before = [], []
        for t in range(self.case.n_steps):
            if t % self.case.sequence == 0:
                before.append({k: self.live[k] for k in ("actor", "critic")})
            self.live, seen, self.key = self.act(self.weights, self.live, self.obs, self.key)
            rows.append({**jax.tree.map(np.asarray, seen), **self.step(np.asarray(seen["actions"]))})
        _, last, self.key = self.act(self.weights, self.live, self.obs, self.key)
        stacked = {k: np.stack([row[k] for row in rows]) for k in rows[0]}
        states = jax.tree.map(lambda *s: np.stack(s), *before)
        self.sequences = jax.block_until_ready(self.finish(stacked, states, last["values"]))

    def step(self, action: np.ndarray) -> dict[str, np.ndarray]:
        space = self.env.action_space
        self.obs, rewards, dones, _ = self.env.step(np.clip(action, space.low, space.high))
        ends = dones.astype(np.float32)
        self.live["starts"] = ends
        return {"rewards": rewards.astype(np.float32), "ends": ends}
