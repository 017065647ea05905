"""Episodes of a fixed agent while somebody stands between the environment and its eyes.

The environment is never touched: rewards, fills and the account follow what really happens. Beside the agent's own
memory, which the attack feeds, runs the memory it would have had: attacks aim away from what the agent would have done
had nobody ever interfered, and the change of its actions is measured from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.losses.risk import empirical_cvar
from tailguard.policy import Layout, RecurrentPolicy, State
from tailguard.ppo import DistributionalPPO

Floats = NDArray[np.floating[Any]]


@dataclass
class Moment:
    """What an attacker knows before the agent acts: N environments at one step."""

    observations: Tensor  # (N, F) the truth, as the policy would see it
    starts: NDArray[np.bool_]  # (N,) an episode begins here
    memory: State  # of the agent, after all that it was shown so far
    unharmed: Tensor  # (N, P) the action law of the agent to whom nobody ever lied
    critic_memories: list[State]  # after the truth

    @property
    def layout(self) -> Layout:
        """One step, with the memory already at zero where an episode begins."""
        return Layout(np.zeros((1, len(self.starts)), np.bool_))


class Attacker(Protocol):
    """Shows the agent something else than the truth."""

    def __call__(self, moment: Moment) -> Tensor:
        """Observations (N, F) that the agent sees instead."""
        ...


@dataclass(frozen=True)
class Played:
    """Finished episodes."""

    returns: Floats  # (E,)
    lengths: Floats  # (E,)
    change: float
    """Mean |change of the action| per step and dimension, in units of the action space."""

    def cvar(self, alpha: float) -> float:
        """Mean of the worst share alpha of the episodes."""
        return empirical_cvar(self.returns, alpha)


class Victim:
    """A fixed agent in its environment, step by step."""

    def __init__(self, agent: DistributionalPPO) -> None:
        env = agent.get_env()
        if env is None:
            raise ConfigError("The agent has no environment to be attacked in. Load it with load(path, env=env).")
        self.env: VecEnv = env
        self.policy: RecurrentPolicy = agent.policy
        self.policy.set_training_mode(False)
        self.statistics = agent.obs_stats

    def reset(self) -> None:
        """Fresh episodes and memories."""
        n = self.env.num_envs
        with self.statistics.frozen():
            self.observations = np.asarray(self.env.reset())
        self.starts = np.ones(n, np.bool_)
        self.memory = self.truth = self.policy.initial_state(n)
        self.critic_memories = [critic.trunk.memory.initial_state(n) for critic in self.policy.critic_list]

    @torch.no_grad()
    def moment(self) -> Moment:
        """Before the next step; every memory is at zero where an episode begins."""
        keep = torch.from_numpy(~self.starts).float()
        self.memory, self.truth = self.memory.keep(keep), self.truth.keep(keep)
        self.critic_memories = [memory.keep(keep) for memory in self.critic_memories]
        seen = self.policy.flat(self.observations)
        law, self.next_truth = self.law(seen, self.truth)
        return Moment(seen, self.starts, self.memory, law, self.critic_memories)

    def law(self, seen: Tensor, memory: State) -> tuple[Tensor, State]:
        """(N, P) parameters of the action law, and the memory after."""
        return self.policy.action_step(seen, memory)

    @torch.no_grad()
    def step(self, moment: Moment, shown: Tensor) -> tuple[Floats, NDArray[np.bool_], Floats]:
        """Act on what was shown: rewards (N,), dones (N,), and how far each action is from the unharmed one (N,)."""
        head = self.policy.action_head
        law, self.memory = self.law(shown, self.memory)
        action, unharmed = (
            head.to_env(head.mode(parameters).numpy(force=True)) for parameters in (law, moment.unharmed)
        )
        change = np.abs(action.astype(np.float64) - unharmed).reshape(len(action), -1).mean(-1)
        for c, critic in enumerate(self.policy.critic_list):
            self.critic_memories[c] = critic.trunk.memory(critic.mask(moment.observations), self.critic_memories[c])[1]
        self.truth = self.next_truth
        with self.statistics.frozen():
            observations, rewards, dones, _ = self.env.step(action)
        self.observations, self.starts = np.asarray(observations), np.asarray(dones)
        return np.asarray(rewards, np.float64), self.starts, change


def play(agent: DistributionalPPO, attacker: Attacker, n_episodes: int, seed: int = 0) -> Played:
    """At least `n_episodes` whole episodes with deterministic actions; every environment plays equally many.

    Environments play the same number each, so that short episodes, the bad ones, are not counted more often.
    """
    victim = Victim(agent)
    n = victim.env.num_envs
    victim.env.seed(seed)
    victim.reset()
    quota = -(-n_episodes // n)
    done_episodes, total, length = np.zeros(n, np.int64), np.zeros(n), np.zeros(n)
    returns, lengths, changes = [], [], []
    while done_episodes.min() < quota:
        moment = victim.moment()
        rewards, dones, change = victim.step(moment, attacker(moment))
        total, length = total + rewards, length + 1.0
        playing = done_episodes < quota
        changes.append(change[playing].sum())
        for i in np.flatnonzero(dones & playing):
            returns.append(total[i])
            lengths.append(length[i])
        done_episodes += dones
        total[dones], length[dones] = 0.0, 0.0
    return Played(np.array(returns), np.array(lengths), float(np.sum(changes)) / float(np.sum(lengths)))
