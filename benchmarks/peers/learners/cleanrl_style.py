"""A single-file LSTM PPO as that style writes it: `nn.LSTM` called step by step, done masks, batches of environments.

A batch holds whole environments, so it is one environment where n_steps exceeds the batch size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from benchmarks.peers.cases import LAYERS, Case, Work
from benchmarks.peers.learners.cycle import CLIP, GAMMA, LAMBDA, MAX_NORM, RATE, VF_COEF, Cycle

State = tuple[Tensor, Tensor]


class Trunk(nn.Module):
    """LSTM, layers, output."""

    def __init__(self, n_inputs: int, hidden: int, n_outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(n_inputs, hidden)
        widths = [hidden, *LAYERS]
        layers = [part for a, b in zip(widths, LAYERS, strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
        self.head = nn.Sequential(*layers, nn.Linear(widths[-1], n_outputs))

    def forward(self, x: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """x (L, B, F), starts (L, B): one call of the LSTM per step, its state zeroed where an episode starts."""
        seen = []
        for step, start in zip(x, starts, strict=True):
            keep = (1.0 - start).view(1, -1, 1)
            out, state = self.lstm(step.unsqueeze(0), (state[0] * keep, state[1] * keep))
            seen.append(out)
        return self.head(torch.cat(seen)), state

    def initial_state(self, n: int) -> State:
        return torch.zeros(1, n, self.lstm.hidden_size), torch.zeros(1, n, self.lstm.hidden_size)


class Agent(nn.Module):
    """Actor and critic, each with a trunk of its own."""

    def __init__(self, env: Any, hidden: int) -> None:
        super().__init__()
        self.discrete = isinstance(env.action_space, spaces.Discrete)
        n_outputs = int(env.action_space.n) if self.discrete else env.action_space.shape[0]
        n_inputs = env.observation_space.shape[0]
        self.actor, self.critic = Trunk(n_inputs, hidden, n_outputs), Trunk(n_inputs, hidden, 1)
        self.log_std = nn.Parameter(torch.zeros(n_outputs), requires_grad=not self.discrete)

    def law(self, output: Tensor) -> Distribution:
        return Categorical(logits=output) if self.discrete else Independent(Normal(output, self.log_std.exp()), 1)


class Rollout(NamedTuple):
    """(T, N, ...) each, and the states before the first step."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    starts: Tensor
    values: Tensor
    advantages: Tensor
    states: tuple[State, State]


class CleanStylePPO(Cycle):
    """The loop: collect n_steps, then epochs over batches of environments."""

    def __init__(self, case: Case, env: Any, work: Work) -> None:
        torch.manual_seed(0)
        self.case, self.env, self.work = case, env, work
        self.agent = Agent(env, case.hidden)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=RATE, eps=1e-5)
        self.obs, self.starts = torch.as_tensor(env.reset()), torch.zeros(case.n_envs)
        self.states = self.agent.actor.initial_state(case.n_envs), self.agent.critic.initial_state(case.n_envs)

    @torch.no_grad()
    def collect_rollouts(self) -> None:
        first, rows, rewards = self.states, [], []
        for _ in range(self.case.n_steps):
            obs, starts = self.obs, self.starts
            law, value = self.judge(obs, starts)
            action = law.sample()
            rows.append((obs, action, law.log_prob(action), starts, value))
            rewards.append(self.step(action))
        _, last_value = self.judge(self.obs, self.starts, keep=True)
        obs, actions, log_probs, starts, values = (torch.stack(column) for column in zip(*rows, strict=True))
        advantages = advantages_of(torch.stack(rewards), values, starts, last_value, self.starts)
        self.rollout = Rollout(obs, actions, log_probs, starts, values, advantages, first)

    def judge(self, obs: Tensor, starts: Tensor, keep: bool = False) -> tuple[Distribution, Tensor]:
        """Action law and value of one step; `keep` leaves the memories where they are."""
        outputs, states = zip(
            *(
                trunk(obs.unsqueeze(0), state, starts.unsqueeze(0))
                for trunk, state in zip((self.agent.actor, self.agent.critic), self.states, strict=True)
            ),
            strict=True,
        )
        if not keep:
            self.states = states
        return self.agent.law(outputs[0][0]), outputs[1][0, :, 0]

    def step(self, action: Tensor) -> Tensor:
        """One step of all environments; the rewards."""
        sent = action.numpy()
        if not self.agent.discrete:
            sent = np.clip(sent, self.env.action_space.low, self.env.action_space.high)
        obs, rewards, dones, _ = self.env.step(sent)
        self.obs, self.starts = torch.as_tensor(obs), torch.as_tensor(dones, dtype=torch.float32)
        return torch.as_tensor(rewards, dtype=torch.float32)

    def train(self) -> None:
        per_batch = max(1, self.case.batch // self.case.n_steps)
        for _ in range(self.work.epochs):
            batches = torch.randperm(self.case.n_envs).split(per_batch)
            for envs in batches[: self.work.batches(per_batch * self.case.n_steps)]:
                self.optimizer.zero_grad()
                self.loss(envs).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()

    def loss(self, envs: Tensor) -> Tensor:
        """Clipped surrogate and squared value error on whole environments."""
        r = self.rollout
        obs, starts = r.obs[:, envs], r.starts[:, envs]
        outputs = [
            trunk(obs, (state[0][:, envs], state[1][:, envs]), starts)[0]
            for trunk, state in zip((self.agent.actor, self.agent.critic), r.states, strict=True)
        ]
        ratio = (self.agent.law(outputs[0]).log_prob(r.actions[:, envs]) - r.log_probs[:, envs]).exp()
        advantages = r.advantages[:, envs]
        returns = advantages + r.values[:, envs]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        surrogate = torch.min(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        return VF_COEF * (outputs[1][..., 0] - returns).square().mean() - surrogate


def advantages_of(rewards: Tensor, values: Tensor, starts: Tensor, last_value: Tensor, last_starts: Tensor) -> Tensor:
    """Generalized advantages (T, N), backwards step by step."""
    advantages, trace = torch.zeros_like(rewards), torch.zeros_like(last_value)
    next_value, next_start = last_value, last_starts
    for t in reversed(range(len(rewards))):
        going_on = 1.0 - next_start
        trace = rewards[t] + GAMMA * going_on * next_value - values[t] + GAMMA * LAMBDA * going_on * trace
        advantages[t] = trace
        next_value, next_start = values[t], starts[t]
    return advantages


def make(case: Case, env: Any, work: Work, threads: int) -> CleanStylePPO:
    torch.set_num_threads(threads)
    return CleanStylePPO(case, env, work)
