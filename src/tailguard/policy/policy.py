"""The policy: one actor and its critics, each with a trunk of its own. Results are return values; nothing is cached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import Field, field_validator
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from tailguard.configuration import Config, Width
from tailguard.errors import ConfigError, EnvContractError, InertSetting
from tailguard.normalization import Affine
from tailguard.policy.acting import Acting, CompiledActing, CompiledStep, Step
from tailguard.policy.action_heads import ActionHead, Bounds, GaussianHead, make_action_head
from tailguard.policy.critics import CriticConfig, CriticHead, QuantileHead, aggregate, make_critic_head
from tailguard.policy.layers import layered
from tailguard.policy.reading import TrunkReader
from tailguard.policy.recurrent import LSTM, Layout, Memory, State, make_memory
from tailguard.policy.risk_value import RiskValue
from tailguard.policy.sight import make_sight
from tailguard.policy.trunk_kernel import ACTIVATIONS as COMPILED_ACTIVATIONS
from tailguard.policy.trunk_layout import known_to_loops

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
}


Layers = Annotated[tuple[Width, ...], Field(max_length=64)]
LogStd = Annotated[float, Field(ge=-20.0, le=20.0)]
"""Beyond these a spread, or its inverse, leaves what float32 can square."""

OF_MEMORY = ("lstm_hidden_size", "n_lstm_layers")
OF_GAUSSIANS = ("log_std_init", "log_std_end", "action_bounds")


class NetArch(Config):
    """Widths of the layers after the memory."""

    pi: Layers = (64, 64)
    """Of the actor."""
    vf: Layers = (64, 64)
    """Of each critic."""


class PolicyConfig(Config):
    """What `policy_kwargs` may hold."""

    memory: Literal["lstm", "gru", "none"] = "lstm"
    """Kind of memory; "MlpPolicy" sets none."""
    lstm_hidden_size: Width = 64
    """Width of the memory, per layer and trunk."""
    n_lstm_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Layers of memory."""
    net_arch: NetArch = NetArch()
    """Layers after the memory; a plain list gives actor and critics the same."""
    activation_fn: str = "tanh"
    """Between those layers: a torch.nn class or its name."""
    ortho_init: bool = True
    """Orthogonal initial weights; off leaves torch's own."""
    log_std_init: LogStd = 0.0
    """Log of the initial spread of a Gaussian policy, whose bounds are -1 and 1; with risk on, -2 unless given."""
    log_std_end: LogStd | None = None
    """Where a ceiling on that logarithm stands when training ends; it falls in a straight line. None: no ceiling."""
    hidden_from_critics: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Columns of the observation that values do not see: what the agent did last, where it changes nothing ahead. A
    value that sees it takes it for a cause, and an advantage over one step counts that for the action."""
    action_bounds: Bounds = "clip"
    """How a Gaussian meets its bounds: samples are clipped, or squashed by tanh with the exact density."""
    shared_lstm: Literal[False] = False
    """Only False: trunks are separate by design."""
    enable_critic_lstm: Literal[True] = True
    """Only True: every critic has a memory of its own when the actor has one."""

    def inert(self) -> Iterable[InertSetting]:
        if self.memory == "none":
            why = 'this policy has no memory; use "MlpLstmPolicy" with memory="lstm" or "gru"'
            yield from self.unread(OF_MEMORY, why)
        if not self.net_arch.pi and not self.net_arch.vf:
            yield from self.unread(("activation_fn",), "there are no layers for it; give net_arch some")

    @field_validator("net_arch", mode="before")
    @classmethod
    def one_list_serves_both(cls, value: Any) -> Any:
        return {"pi": value, "vf": value} if isinstance(value, (list, tuple)) else value

    @field_validator("activation_fn", mode="before")
    @classmethod
    def a_class_goes_by_its_name(cls, value: Any) -> Any:
        names = {kind: name for name, kind in ACTIVATIONS.items()}
        name = names.get(value, value) if isinstance(value, type) else value
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise ConfigError(f"activation_fn={value!r} is not one of {', '.join(ACTIVATIONS)}.")
        return name


class Trunk(nn.Module):
    """Memory, then layers: the body of the actor or of one critic."""

    def __init__(self, in_features: int, widths: tuple[int, ...], config: PolicyConfig) -> None:
        super().__init__()
        self.memory = make_memory(config.memory, in_features, config.lstm_hidden_size, config.n_lstm_layers)
        layers: list[nn.Module] = []
        width = self.memory.out_features
        for next_width in widths:
            linear = nn.Linear(width, next_width)
            if config.ortho_init:
                nn.init.orthogonal_(linear.weight, 2**0.5)
                nn.init.zeros_(linear.bias)
            layers += [linear, ACTIVATIONS[config.activation_fn]()]
            width = next_width
        self.layers = nn.Sequential(*layers)
        self.out_features = width
        self.activation = config.activation_fn

    def step(self, last: nn.Linear, n: int) -> Step:
        """A function (observations (n, F), state) -> (output (n, W), state after) with the weights as they are now."""
        memory = self.compiled_memory(last)
        if memory is not None:
            return CompiledStep(memory, self.linear(last), self.activation, n)

        def step(x: Tensor, state: State) -> tuple[Tensor, State]:
            features, state = self.memory.step(x, state)
            return last(self.layers(features)), state

        return step

    def compiled_memory(self, last: nn.Linear) -> LSTM | None:
        """The memory, where the compiled loops know this trunk; None where torch has to do the work."""
        known = known_to_loops(last.weight) and self.activation in COMPILED_ACTIVATIONS
        return self.memory if known and isinstance(self.memory, LSTM) else None

    def layered(self, features: Tensor, last: nn.Linear) -> Tensor:
        """last(layers(features)) with gradient, in compiled loops where these know the layers."""
        if self.compiled_memory(last) is None:
            return last(self.layers(features))  # type: ignore[no-any-return]
        return layered(self.linear(last), self.activation == "relu", features)

    def linear(self, last: nn.Linear) -> list[nn.Linear]:
        """All linear layers after the memory, and the head's."""
        return [*(layer for layer in self.layers if isinstance(layer, nn.Linear)), last]


class Judged(NamedTuple):
    """A critic's word on some steps."""

    quantiles: Tensor  # (..., Q) in normalized units
    features: Tensor  # (..., H) what the head read


class Critic(nn.Module):
    """A trunk and a head."""

    def __init__(self, in_features: int, config: PolicyConfig, critic: CriticConfig) -> None:
        super().__init__()
        self.sight = make_sight(in_features, config.hidden_from_critics)
        self.trunk = Trunk(in_features, config.net_arch.vf, config)
        self.head: CriticHead = make_critic_head(self.trunk.out_features, critic)

    def features(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        """What the head reads (L, B, H), for whole sequences."""
        return self.trunk.layers(self.trunk.memory.unroll(self.sight(obs), layout, state).features)  # type: ignore[no-any-return]

    def forward(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        """The head's output (L, B, *) for whole sequences, in normalized units."""
        return self.head(self.features(obs, layout, state))  # type: ignore[no-any-return]

    def evaluate(self, obs: Tensor, layout: Layout, state: State, extra: Tensor) -> tuple[Judged, Judged, State]:
        """Laws of the steps (L, B, *) and of extra observations (E, *), and the state after the last step."""
        unrolled = self.trunk.memory.unroll(self.sight(obs), layout, state, self.sight(extra))
        return self.judged(unrolled.features), self.judged(unrolled.extra_features), unrolled.state

    def step(self, obs: Tensor, state: State) -> tuple[Judged, State]:
        """Laws (N, *) of single observations and the next state."""
        features, state = self.trunk.memory.step(self.sight(obs), state)
        return self.judged(features), state

    def reader(self, sequence_length: int) -> TrunkReader | None:
        """This critic in compiled loops, with the weights as they are now; None where torch has to do the work."""
        last, trunk, rounded = self.head.last_layer, self.trunk, self.head.config.rounded
        memory = trunk.compiled_memory(last) if isinstance(self.head, QuantileHead) else None
        if memory is None:
            return None
        return TrunkReader(memory, trunk.linear(last), trunk.activation, rounded, sequence_length)

    def judged(self, remembered: Tensor) -> Judged:
        """From the memory's output to the law."""
        features = self.trunk.layers(remembered)
        return Judged(self.head.quantiles(self.head(features)), features)


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
        sight = make_sight(self.obs_features, self.config.hidden_from_critics)
        self.risk_value = RiskValue(features, self.obs_features, sight, risk_units) if risk_units else None

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

    def actor_step(self, n: int) -> Step:
        """A function (observations (n, F), state) -> (output (n, W) that the action head makes a law of, state after).

        It keeps the weights of this moment. `state` must be zero where an episode starts.
        """
        return self.actor.step(self.action_head.last_layer, n)

    def acting(self, n_steps: int, n: int, generator: torch.Generator) -> Acting:
        """The actor through a rollout, with the weights of this moment; all chance is drawn at once."""
        step, head = self.actor_step(n), self.action_head
        chance = head.prepared(head.chance((n_steps, n), generator).to(self.device))
        if isinstance(step, CompiledStep):
            return CompiledActing(step, head, chance)
        return Acting(step, head, chance)

    def initial_state(self, n: int) -> State:
        """Zero state of the actor for n environments."""
        return self.actor.memory.initial_state(n)

    # learning

    def narrow(self, progress: float) -> None:
        """Let the ceiling on a Gaussian policy's spread fall; between updates, so that acting and learning agree."""
        end, head = self.config.log_std_end, self.action_head
        if end is not None and isinstance(head, GaussianHead):
            with torch.no_grad():
                head.log_std.clamp_(max=self.config.log_std_init + progress * (end - self.config.log_std_init))

    def action_parameters(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        """Parameters (L, B, P) of the action law over whole sequences."""
        remembered = self.actor.memory.unroll(obs, layout, state).features
        return self.action_head.law(self.actor.layered(remembered, self.action_head.last_layer))

    def aggregate(self, quantiles: list[Tensor]) -> Tensor:
        """One law from the critics' (..., Q); the same everywhere."""
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
        seen = [obs, *(critic.sight(obs) for critic in self.critic_list)]
        stepped = [memory.step(x, part) for memory, x, part in zip(self.memories, seen, before, strict=True)]
        parameters = self.action_head(self.actor.layers(stepped[0][0]))
        head = self.action_head
        if deterministic:
            action = head.mode(parameters)
        else:
            action = head.sample(parameters, head.chance((len(obs),), None).to(self.device))
        actions = head.to_env(action)
        after = join_layers([part for _, part in stepped])
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
        """PopArt on every critic: (last layer, factor on its weights, factor on its gradients)."""
        heads = [critic.head for critic in self.critic_list]
        return [(head.last_layer, *head.rescale(before, after, first)) for head in heads]


def join_layers(states: list[State]) -> State:
    """One State that holds several memories' layers, one after the other."""
    return State(torch.cat([part.hidden for part in states]), torch.cat([part.cell for part in states]))


def flat_features(space: spaces.Space[Any]) -> int:
    """Number of features of a Box observation, or a clear refusal."""
    if not isinstance(space, spaces.Box):
        raise EnvContractError(
            f"The observation space {space} is not supported: observations must be a Box. Wrap the environment, for "
            "example with gymnasium.wrappers.FlattenObservation."
        )
    if int(np.prod(space.shape)) == 0:
        raise EnvContractError(f"The observation space {space} has no features.")
    return int(np.prod(space.shape))
