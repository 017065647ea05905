"""An attacker that learns: a policy of our own PPO whose reward is what the agent loses.

It sees the truth and what the agent would do, and chooses a point of the ball (or of the prices' ball) at every step.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tailguard.adversary import Ball
from tailguard.policy import State
from tailguard.ppo import DistributionalPPO
from tailguard.robustness.play import Moment, Victim
from tailguard.schedules import Schedule

STEPS = 65_536
SETTINGS: dict[str, Any] = {
    "n_steps": 128,
    "learning_rate": Schedule(start=1e-3, end=0.0),
    "critic": {"twin": False, "n_quantiles": 8},
    "n_epochs": 4,
}


class Lever(Protocol):
    """What an attacker's action moves."""

    size: int

    def pull(self, moment: Moment, action: Tensor) -> Tensor:
        """Observations (N, F) that the agent is shown; action (N, size) within -1 and 1."""
        ...


class ObservationLever:
    """One dimension per feature that can be attacked."""

    def __init__(self, ball: Ball) -> None:
        self.ball, self.open = ball, torch.nonzero(ball.sizes > 0.0)[:, 0]
        self.size = len(self.open)

    def pull(self, moment: Moment, action: Tensor) -> Tensor:
        unit = torch.zeros_like(moment.observations)
        unit[:, self.open] = action
        if self.ball.norm == "l2":
            unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=1.0)
        return self.ball.moved(moment.observations, unit)


class AttackEnv(VecEnv):
    """The agent and its environment as the attacker's environment: actions are perturbations, rewards are losses.

    It is no wrapper: normalizer and attributes below belong to the agent, not to the attacker.
    """

    render_mode: str | None = None

    def __init__(self, agent: DistributionalPPO, lever: Lever) -> None:
        self.victim, self.lever = Victim(agent), lever
        n_seen = agent.policy.obs_features + agent.policy.action_head.action_dim
        seen = spaces.Box(-np.inf, np.inf, (n_seen,), np.float32)
        super().__init__(self.victim.env.num_envs, seen, spaces.Box(-1.0, 1.0, (lever.size,), np.float32))

    def reset(self) -> Any:
        self.victim.reset()
        return self.look()

    def look(self) -> NDArray[np.float32]:
        self.now = self.victim.moment()
        seen: NDArray[np.float32] = sight(self.victim, self.now).numpy()
        return seen

    def step_async(self, actions: NDArray[Any]) -> None:
        self.pending = torch.from_numpy(np.asarray(actions, np.float32))

    def step_wait(self) -> Any:
        rewards, dones, _ = self.victim.step(self.now, self.lever.pull(self.now, self.pending))
        # an episode's end is an end for the attacker too: nothing is bootstrapped, so no last observation is needed
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        return self.look(), (-rewards).astype(np.float32), dones.copy(), infos

    def close(self) -> None:
        """The environment belongs to the agent."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self, method_name)(*args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


def sight(victim: Victim, moment: Moment) -> Tensor:
    """(N, F + A) the truth, and what the unharmed agent would do."""
    mode = victim.policy.action_head.mode(moment.unharmed)
    return torch.cat([moment.observations, mode.clamp(-3.0, 3.0)], -1)


class LearnedAttack:
    """A trained attacker at work, deterministic, with a memory of its own."""

    def __init__(self, model: DistributionalPPO, victim: Victim, lever: Lever) -> None:
        self.model, self.victim, self.lever = model, victim, lever
        self.memory: State | None = None

    @torch.no_grad()
    def __call__(self, moment: Moment) -> Tensor:
        policy = self.model.policy
        n = len(moment.starts)
        memory = self.memory if self.memory is not None else policy.initial_state(n)
        memory = memory.keep(torch.from_numpy(~moment.starts).float())
        head = policy.action_head
        parameters, self.memory = policy.action_step(sight(self.victim, moment), memory)
        action = head.to_env(head.mode(parameters).numpy(force=True))
        return self.lever.pull(moment, torch.from_numpy(action))


def train_attacker(agent: DistributionalPPO, ball: Ball, seed: int, steps: int = STEPS) -> LearnedAttack:
    """Train an attacker of observations on the agent's own environment."""
    return trained(agent, ObservationLever(ball), seed, steps)


def trained(agent: DistributionalPPO, lever: Lever, seed: int, steps: int) -> LearnedAttack:
    """Train with a policy of the agent's own kind: one with memory attacks one with memory."""
    remembers = agent.policy_config.memory != "none"
    kind = "MlpLstmPolicy" if remembers else "MlpPolicy"
    kwargs = {"net_arch": [32, 32], **({"lstm_hidden_size": 32} if remembers else {})}
    env: VecEnv = AttackEnv(agent, lever)
    model = DistributionalPPO(kind, env, policy_kwargs=kwargs, seed=seed, gamma=agent.config.gamma, **SETTINGS)
    model.learn(steps)
    return LearnedAttack(model, Victim(agent), lever)
