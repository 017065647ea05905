"""What `policy_kwargs` may hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from torch import nn

from tailguard.configuration import Config, Width
from tailguard.errors import ConfigError, InertSetting
from tailguard.policy.action_heads import Bounds
from tailguard.policy.recurrent import RecurrentInit

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

OF_MEMORY = ("lstm_hidden_size", "n_lstm_layers", "recurrent_init")
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
    recurrent_init: RecurrentInit = "orthogonal"
    """How weights of the memory start: `orthogonal`, an LSTM with forget bias 1; `uniform`, as in torch, which forgets
    within two steps; or `mixed`, uniform, but half of the units remember for 2 to 100 steps."""
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
