"""The policy: one actor and its critics, each with a trunk of its own. Results are return values; nothing is cached."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from tailguard.errors import ConfigError, EnvContractError
from tailguard.normalization import Affine
from tailguard.policy.action_heads import HEADS, ActionHead, GaussianHead, make_action_head
from tailguard.policy.config import PolicyConfig
from tailguard.policy.critics import CriticConfig, CriticHead, QuantileHead, aggregate, make_critic_head
from tailguard.policy.known import is_plain, refuse_hooks_never_called, replaced
from tailguard.policy.native import sequence_features, why_torch
from tailguard.policy.observation_mask import ObservationMask, flat_features, make_observation_mask
from tailguard.policy.recurrent import GRU, LSTM, Layout, Memory, NoMemory, State, join_layers
from tailguard.policy.risk_value import RiskValue
from tailguard.policy.trunk import Trunk


class CriticOutput(NamedTuple):
    """What a critic predicts at some steps."""

    quantiles: Tensor  # (..., Q) of the return, in normalized units
    features: Tensor  # (..., D) what the head read


class Critic(nn.Module):
    """A trunk and a head."""

    def __init__(self, in_features: int, config: PolicyConfig, critic: CriticConfig) -> None:
        super().__init__()
        self.mask = make_observation_mask(in_features, config.hidden_from_critics)
        self.trunk = Trunk(in_features, config.net_arch.vf, config)
        self.head: CriticHead = make_critic_head(self.trunk.out_features, critic)

    def features(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        """What the head reads (L, B, H), for whole sequences."""
        return sequence_features(self.trunk, self.head, self.mask(obs), state, layout)

    def forward(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        """The head's output (L, B, *) for whole sequences, in normalized units."""
        return self.head(self.features(obs, layout, state))  # type: ignore[no-any-return]

    def evaluate(
        self, obs: Tensor, layout: Layout, state: State, extra: Tensor
    ) -> tuple[CriticOutput, CriticOutput, State]:
        """Predictions at the steps (L, B, *) and at extra observations (E, *), and the state after the last step."""
        unrolled = self.trunk(self.mask(obs), state, layout, self.mask(extra))
        return self.output(unrolled.features), self.output(unrolled.extra_features), unrolled.state

    def step(self, obs: Tensor, state: State) -> tuple[CriticOutput, State]:
        """Predictions (N, *) at single observations, and the state after them."""
        features, state = self.trunk(self.mask(obs), state)
        return self.output(features), state

    def output(self, features: Tensor) -> CriticOutput:
        """The prediction from what the head reads."""
        return CriticOutput(self.head.quantiles(self.head(features)), features)

    def why_torch(self) -> str | None:
        """Why predictions go through torch; None where the native core makes them."""
        if not is_plain(self, Critic) or not is_plain(self.head, QuantileHead):
            return f"a critic's {type(self.head).__name__} is not a plain quantile head, or hooked"
        if not any(is_plain(self.mask, kind) for kind in (nn.Identity, ObservationMask)):
            return "what a critic sees goes through a module that was replaced or hooked"
        return why_torch(self.trunk, self.head.last_layer)


class RecurrentPolicy(BasePolicy):
    """Actor and critics with separate memories ("MlpLstmPolicy"), or without any ("MlpPolicy")."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: PolicyConfig | None = None,
        critic: CriticConfig | None = None,
        risk_units: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space)
        self.register_buffer("anchor", torch.zeros(()), persistent=False)
        self.anchor: Tensor
        self.config, self.critic_config = config or PolicyConfig(), critic or CriticConfig()
        self.obs_features = flat_features(observation_space)
        self.actor = Trunk(self.obs_features, self.config.net_arch.pi, self.config)
        self.action_head: ActionHead = make_action_head(
            self.actor.out_features, action_space, self.config.action_bounds, self.config.log_std_init
        )
        if self.config.ortho_init:
            for module in self.action_head.modules():
                if isinstance(module, nn.Linear):
                    nn.init.orthogonal_(module.weight, 0.01)
                    nn.init.zeros_(module.bias)
        n_critics = 2 if self.critic_config.twin else 1
        self.critics = nn.ModuleList(
            Critic(self.obs_features, self.config, self.critic_config) for _ in range(n_critics)
        )
        features = self.critic_list[0].trunk.out_features
        mask = make_observation_mask(self.obs_features, self.config.hidden_from_critics)
        self.risk_value = RiskValue(features, self.obs_features, mask, risk_units) if risk_units else None

    @property
    def device(self) -> torch.device:
        """Where the weights are, without a walk over all of them: acting asks at every step."""
        return self.anchor.device

    @property
    def critic_list(self) -> list[Critic]:
        """The critics, one or two."""
        return list(self.critics)  # type: ignore[arg-type]

    def set_critic_config(self, config: CriticConfig) -> None:
        """Take over settings that change no network, such as the range of value clipping."""
        self.critic_config = config
        for critic in self.critic_list:
            critic.head.config = config

    # acting

    def action_step(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """Parameters (n, P) of the action distribution for single observations (n, F), and the state after.

        The last step of `action_parameters`, which a subclass may override alone.
        """
        features, after = self.actor(obs, state)
        if not replaced(self, RecurrentPolicy, ("action_parameters",)):
            return self.action_head(features), after
        one_step = Layout(np.zeros((1, len(obs)), np.bool_))
        return self.action_parameters(obs.unsqueeze(0), one_step, state)[0], after

    def refuse_what_nobody_calls(self) -> None:
        """Methods and hooks that only some of acting, training, evaluation and `predict` would go through."""
        refuse_hooks_never_called(self, (RecurrentPolicy, Critic))
        lonely = replaced(self, RecurrentPolicy, ("action_step",))
        if lonely and not replaced(self, RecurrentPolicy, ("action_parameters",)):
            raise ConfigError(
                f"{type(self).__name__} overrides {' and '.join(lonely)}, which training does not go through. Override "
                "action_parameters(obs, layout, state): acting, training, evaluation and predict all follow it."
            )
        for memory in self.memories:
            kind = next((kind for kind in (LSTM, GRU, NoMemory) if isinstance(memory, kind)), type(memory))
            lonely = replaced(memory, kind, ("step", "unroll"))
            if len(lonely) == 1:
                raise ConfigError(
                    f"{type(memory).__name__} overrides {lonely[0]} alone. A memory acts by step and learns by unroll: "
                    "override both, to the same effect."
                )
        for c, critic in enumerate(self.critic_list):
            lonely = replaced(critic, Critic, ("forward", "features", "evaluate", "step", "output"))
            if lonely:
                raise ConfigError(
                    f"critics.{c} overrides {' and '.join(lonely)}, which only some of training, evaluation and "
                    "predicting go through. Replace its trunk.memory, trunk.layers or head instead."
                )

    def why_torch_acts(self) -> str | None:
        """Why acting goes through torch; None where the native core steps the actor."""
        head = self.action_head
        if replaced(self, RecurrentPolicy, ("action_parameters", "action_step")):
            return f"{type(self).__name__} has methods of its own"
        if not any(is_plain(head, kind) for kind in HEADS):
            return f"{type(head).__name__} is not one of the package's, or hooked"
        return why_torch(self.actor, head.last_layer)

    def initial_state(self, n: int) -> State:
        """Zero state of the actor for n environments."""
        return self.actor.memory.initial_state(n)

    # learning

    def clamp_log_std(self, progress: float) -> None:
        """Let the ceiling on a Gaussian policy's spread fall; between updates, so that acting and learning agree."""
        end, head = self.config.log_std_end, self.action_head
        if end is not None and isinstance(head, GaussianHead) and head.log_std.requires_grad:
            with torch.no_grad():
                head.log_std.clamp_(max=self.config.log_std_init + progress * (end - self.config.log_std_init))

    def action_parameters(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        """Parameters (L, B, P) of the action distribution over whole sequences (L, B, F)."""
        features = sequence_features(self.actor, self.action_head, obs, state, layout)
        return self.action_head(features)  # type: ignore[no-any-return]

    def aggregate(self, quantiles: list[Tensor]) -> Tensor:
        """One distribution from the critics' (..., Q); the same everywhere."""
        return aggregate(quantiles, self.masses, self.critic_config.aggregation)

    @property
    def masses(self) -> Tensor:
        """(Q,) the probability each quantile stands for."""
        return self.critic_list[0].head.masses

    # SB3's doors

    def flat(self, obs: NDArray[Any]) -> Tensor:
        """Observations (N, ...) as (N, F) float32."""
        return torch.as_tensor(self.flat_array(obs), device=self.device)

    def flat_array(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        """The same without torch."""
        return np.asarray(obs, dtype=np.float32).reshape(-1, self.obs_features)

    @property
    def memories(self) -> list[Memory]:
        """The actor's memory and each critic's: the state that predict hands out and takes holds all of them."""
        return [self.actor.memory, *(critic.trunk.memory for critic in self.critic_list)]

    def states_from(self, state: Any, episode_start: Any, n: int) -> list[State]:
        """The state a user hands in, split per memory and zeroed where an episode starts."""
        fresh = [memory.initial_state(n) for memory in self.memories]
        if state is not None:
            fresh = self.split_state(state, fresh)
        if episode_start is None:
            return fresh
        starts = np.asarray(episode_start, dtype=bool).reshape(-1)
        if starts.shape != (n,):
            raise EnvContractError(f"episode_start has shape {starts.shape}; expected ({n},): one per observation.")
        keep = torch.as_tensor(~starts, dtype=torch.float32, device=self.device)
        return [part.keep(keep) for part in fresh]

    def split_state(self, state: Any, like: list[State]) -> list[State]:
        """(layers of all memories, n, H) arrays as one State per memory."""
        whole = join_layers(like)
        hidden, cell = (torch.as_tensor(np.asarray(part), dtype=torch.float32, device=self.device) for part in state)
        if hidden.shape != whole.hidden.shape or cell.shape != whole.cell.shape:
            raise EnvContractError(
                f"The state has shapes {tuple(hidden.shape)} and {tuple(cell.shape)}; expected "
                f"{tuple(whole.hidden.shape)} and {tuple(whole.cell.shape)}. Pass what predict returned, or None."
            )
        hidden_parts = torch.split(hidden, [len(part.hidden) for part in like])
        cell_parts = torch.split(cell, [len(part.cell) for part in like])
        return [State(h, c) for h, c in zip(hidden_parts, cell_parts, strict=True)]

    @torch.no_grad()
    def predict(
        self,
        observation: Any,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """Actions for observations, and the memory after them (docs of SB3's RecurrentPPO apply)."""
        obs, single = self.batched(observation)
        before = self.states_from(state, episode_start, len(obs))
        parameters, acted = self.action_step(obs, before[0])
        seen = [
            critic.trunk.memory(critic.mask(obs), part)
            for critic, part in zip(self.critic_list, before[1:], strict=True)
        ]
        head = self.action_head
        if deterministic:
            action = head.mode(parameters)
        else:
            action = head.sample(parameters, head.noise((len(obs),), None).to(self.device))
        actions = head.to_env(action.numpy(force=True))
        after = join_layers([acted, *(part for _, part in seen)])
        return (actions[0] if single else actions), after.detach_numpy()

    @torch.no_grad()
    def predict_law(self, observation: Any, state: Any = None, episode_start: Any = None) -> Tensor:
        """Quantiles (n, Q) of the aggregated critics before acting on the observations, in normalized units."""
        obs, _ = self.batched(observation)
        before = self.states_from(state, episode_start, len(obs))[1:]
        laws = [critic.step(obs, part)[0].quantiles for critic, part in zip(self.critic_list, before, strict=True)]
        return self.aggregate(laws)

    def batched(self, observation: Any) -> tuple[Tensor, bool]:
        """Observations as (N, F), and whether a single one was given."""
        array = np.asarray(observation)
        shape = self.observation_space.shape
        if array.shape == shape:
            return self.flat(array[None]), True
        if array.shape[1:] != shape or array.ndim != len(shape or ()) + 1:
            raise EnvContractError(
                f"The observation has shape {array.shape}; expected {shape} or (n, *{shape}) of the training space."
            )
        return self.flat(array), False

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        raise NotImplementedError("A recurrent policy acts through predict(obs, state, episode_start).")

    def save(self, path: str) -> None:
        raise NotImplementedError("A policy alone is not an agent: save the model (model.save(path)).")

    @classmethod
    def load(cls, path: str, device: Any = "auto") -> Any:
        raise NotImplementedError("Load the model (DistributionalPPO.load(path)); its .policy is this policy.")

    def rescale_critics(self, before: Affine, after: Affine, first: bool) -> list[tuple[nn.Linear, float, float]]:
        """PopArt on every critic: (last layer, factor on its weights, factor on its gradients).

        Also on a frozen one: its last layer changes its unit, and what it predicts in raw units stays.
        """
        return [(critic.head.last_layer, *critic.head.moved(before, after, first)) for critic in self.critic_list]
