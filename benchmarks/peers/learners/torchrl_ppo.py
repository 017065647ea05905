"""PPO from TorchRL's parts: LSTMModule, its collector, its advantages and ClipPPOLoss, on batches of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
from torchrl.modules import MLP, IndependentNormal, LSTMModule, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

from benchmarks.peers.cases import LAYERS, Case, Work
from benchmarks.peers.learners.cycle import CLIP, GAMMA, LAMBDA, MAX_NORM, RATE, VF_COEF, Cycle


class Wrapped(EnvBase):
    """An SB3 VecEnv for TorchRL; it resets by itself, so a reset only shows what it already stands at."""

    def __init__(self, env: Any) -> None:
        n = env.num_envs
        super().__init__(batch_size=torch.Size([n]))
        self.vec_env, self.obs = env, env.reset()
        self.discrete = isinstance(env.action_space, spaces.Discrete)
        self.observation_spec = Composite(observation=Unbounded((n, *env.observation_space.shape)), shape=(n,))
        self.action_spec = (
            CategoricalSpec(int(env.action_space.n), shape=(n,))
            if self.discrete
            else Unbounded((n, *env.action_space.shape))
        )
        self.reward_spec = Unbounded((n, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.as_tensor(self.obs)}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict["action"].numpy()
        if not self.discrete:
            action = np.clip(action, self.vec_env.action_space.low, self.vec_env.action_space.high)
        self.obs, rewards, dones, _ = self.vec_env.step(action)
        done = torch.as_tensor(dones).unsqueeze(-1)
        return TensorDict(
            {
                "observation": torch.as_tensor(self.obs),
                "reward": torch.as_tensor(rewards, dtype=torch.float32).unsqueeze(-1),
                "done": done,
                "terminated": done,
            },
            self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        self.vec_env.seed(seed)


class Gaussian(nn.Module):
    """Mean and spread of a Gaussian law."""

    def __init__(self, n_outputs: int, **layers: Any) -> None:
        super().__init__()
        self.mean, self.log_std = MLP(out_features=n_outputs, **layers), nn.Parameter(torch.zeros(n_outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.log_std.exp().expand_as(mean)


def memory(name: str, env: Any, hidden: int) -> LSTMModule:
    """An LSTM whose state goes by its own keys."""
    states = [f"{name}_h", f"{name}_c"]
    return LSTMModule(
        env.observation_space.shape[0],
        hidden,
        in_keys=["observation", *states],
        out_keys=[f"{name}_features", *(("next", key) for key in states)],
    )


def make_actor(env: Any, hidden: int) -> ProbabilisticTensorDictSequential:
    layers = {"in_features": hidden, "num_cells": list(LAYERS), "activation_class": nn.Tanh}
    if isinstance(env.action_space, spaces.Discrete):
        head, keys, law = MLP(out_features=int(env.action_space.n), **layers), ["logits"], Categorical
    else:
        head, keys, law = Gaussian(env.action_space.shape[0], **layers), ["loc", "scale"], IndependentNormal
    return ProbabilisticTensorDictSequential(
        memory("actor", env, hidden),
        TensorDictModule(head, ["actor_features"], keys),
        ProbabilisticTensorDictModule(
            keys,
            ["action"],
            distribution_class=law,
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


def make_critic(env: Any, hidden: int) -> TensorDictSequential:
    head = MLP(in_features=hidden, out_features=1, num_cells=list(LAYERS), activation_class=nn.Tanh)
    return TensorDictSequential(
        memory("critic", env, hidden), TensorDictModule(head, ["critic_features"], ["state_value"])
    )


class TorchRLPPO(Cycle):
    """Collect n_steps, estimate advantages, then epochs over batches of sequences."""

    def __init__(self, case: Case, env: Any, work: Work) -> None:
        torch.manual_seed(0)
        self.case, self.work = case, work
        actor, self.critic = make_actor(env, case.hidden), make_critic(env, case.hidden)
        primers = [module[0].make_tensordict_primer() for module in (actor, self.critic)]
        wrapped = TransformedEnv(Wrapped(env), Compose(InitTracker(), *primers))
        policy = TensorDictSequential(self.critic, actor)
        self.collector = Collector(wrapped, policy, frames_per_batch=case.rollout, track_traj_ids=False)
        self.batches = iter(self.collector)
        self.loss = ClipPPOLoss(
            actor, self.critic, normalize_advantage=True, entropy_bonus=False, critic_coeff=VF_COEF, clip_epsilon=CLIP
        )
        self.loss.set_keys(value="state_value")
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=RATE, eps=1e-5)

    @torch.no_grad()
    def collect_rollouts(self) -> None:
        data = next(self.batches)  # (N, T)
        value, done = data["state_value"], data["next", "done"]
        last = self.critic(data[:, -1]["next"].clone())["state_value"]
        next_value = torch.cat([value[:, 1:], last.unsqueeze(1)], 1)
        advantage, target = vec_generalized_advantage_estimate(
            GAMMA, LAMBDA, value, next_value, data["next", "reward"], done, done
        )
        data = data.exclude("next", "actor_features", "critic_features")
        data["advantage"], data["value_target"] = advantage, target
        self.sequences = data.reshape(-1, self.case.sequence)

    def train(self) -> None:
        per_batch = max(1, self.case.batch // self.case.sequence)
        for _ in range(self.work.epochs):
            batches = torch.randperm(len(self.sequences)).split(per_batch)
            for chosen in batches[: self.work.batches(self.case.batch)]:
                with set_recurrent_mode(True):
                    losses = self.loss(self.sequences[chosen])
                self.optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), MAX_NORM)
                self.optimizer.step()


def make(case: Case, env: Any, work: Work, threads: int) -> TorchRLPPO:
    torch.set_num_threads(threads)
    return TorchRLPPO(case, env, work)
