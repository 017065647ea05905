"""What the UPGD family shares: options, state that is saved whole, and the way to one step (kernels/optimizer.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailguard.errors import ConfigError, StateError, did_you_mean
from tailguard.kernels import optimizer as kernels
from tailguard.kernels.reference import optimizer as reference
from tailguard.optim.noise import NoisePool

Group = dict[str, Any]
Gate = Literal["max", "minmax"]
Protect = Literal["weights", "noise"]

STATE_VERSION = 1
MODES: dict[str, tuple[str, ...]] = {"gate": ("max", "minmax"), "protect": ("weights", "noise")}


class GatedOptimizer(Optimizer):
    """Base of UPGD, AdaptiveUPGD and UPGDW: a step whose direction each weight takes according to its utility.

    The step itself is defined by `kernels.reference.optimizer.gated_step`; a subclass says what it keeps of every
    parameter and how weight decay enters.
    """

    scale_free: ClassVar[bool]
    """Whether a factor on the gradient cancels: then whoever damps the gradient must damp the step instead."""
    buffers: ClassVar[tuple[str, ...]]
    """Names of the state tensors, each shaped like its parameter: utility and, with Adam's direction, two moments."""
    decoupled_decay: ClassVar[bool] = True
    """Whether weight decay shrinks the weights beside the step, or enters the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: Group,
        *,
        gate: Gate,
        protect: Protect,
        adaptive_noise: bool,
        generator: torch.Generator | None,
        fused: bool,
    ) -> None:
        for name, value in (("gate", gate), ("protect", protect)):
            if value not in MODES[name]:
                raise ConfigError(
                    f"{name}={value!r} is unknown: use one of {', '.join(MODES[name])}."
                    f"{did_you_mean(str(value), MODES[name])}"
                )
        self.gate, self.protect, self.adaptive_noise, self.fused = gate, protect, bool(adaptive_noise), bool(fused)
        self.noise = NoisePool(generator)
        self.mean_gate, self.finite_only, self.step_taken, self.n_threads = 1.0, False, True, 1
        params = list(params)
        if not params:
            raise ConfigError(
                f"{type(self).__name__} got no parameters. Pass module.parameters() of a non-empty module."
            )
        super().__init__(params, defaults)

    mean_gate: float
    """Mean gate of the last step: the learning rate it used, in units of the nominal one."""
    finite_only: bool
    """Whether a step after which a weight or an average would not be finite is left out (see `StepGuard`)."""
    step_taken: bool
    """Whether the last step was taken; False only with `finite_only`."""
    n_threads: int
    """Threads that a native step of many weights may use; its results do not depend on their number."""

    def add_param_group(self, param_group: Group) -> None:
        check_hyperparameters(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                raise ConfigError(f"{type(self).__name__} needs real floating point parameters, found {param.dtype}.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: update the averages, compare every utility with the best, move along the gated direction."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        random_state = self.noise.generator.get_state() if self.finite_only else None
        parts, self.step_taken = self._parts(), True
        if not parts:
            return loss
        step = partial(kernels.gated_step, n_threads=self.n_threads) if self.fused else reference.gated_step
        gates = step(
            list(parts.values()),
            minmax=self.gate == "minmax",
            protect_weights=self.protect == "weights",
            adaptive_noise=self.adaptive_noise,
            finite_only=self.finite_only,
        )
        self.step_taken = gates is not None
        if gates is not None:
            self.mean_gate = gates / sum(param.numel() for param in parts)
            for param, part in parts.items():
                kept = zip(self.buffers, (part.utility, part.first, part.second), strict=False)
                self.state[param] = {"step": int(part.numbers.step), **dict(kept)}
        elif random_state is not None:
            self.noise.generator.set_state(random_state)
        return loss

    def _parts(self) -> dict[Tensor, kernels.GatedPart]:
        """What a step works on: every parameter with a gradient, and what is kept of it, zeros at first."""
        parts: dict[Tensor, kernels.GatedPart] = {}
        params = [param for group in self.param_groups for param in group["params"]]
        if all(param.grad is None or param.numel() == 0 for param in params):
            return parts
        noisy = any(group["sigma"] != 0 for group in self.param_groups)
        place, sign = self.noise.draw(sum(param.numel() for param in params)) if noisy else (0, 0.0)
        for group in self.param_groups:
            for param in group["params"]:
                start, place = place, place + param.numel()
                if param.grad is None or param.numel() == 0:
                    continue
                if param.grad.layout != torch.strided:
                    raise ConfigError(
                        f"{type(self).__name__} needs dense gradients: a utility compares every weight with every "
                        "other. Build the embedding with sparse=False."
                    )
                state = self.state.get(param, {})
                utility, *moments = (state[name] if state else torch.zeros_like(param) for name in self.buffers)
                first, second = moments or (None, None)
                noise = self.noise.read(param.device, param.dtype)[start:place] if noisy else None
                numbers = self._numbers(group, state.get("step", 0) + 1, sign)
                parts[param] = kernels.GatedPart(param, param.grad, utility, first, second, noise, numbers)
        return parts

    def _numbers(self, group: Group, step: int, sign: float) -> kernels.StepNumbers:
        """The numbers of a group at a parameter's step; sign: of the noise."""
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        return kernels.StepNumbers(
            rate=rate,
            decay=1.0 - rate * decay if self.decoupled_decay else 1.0,
            l2=0.0 if self.decoupled_decay else decay,
            sigma=sign * group["sigma"],
            beta_utility=group["beta_utility"],
            beta1=beta1,
            beta2=beta2,
            eps=group.get("eps", 1.0),
            step=step,
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts only: it fits safetensors and JSON."""
        state = super().state_dict()
        state["param_groups"] = [
            {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
            for group in state["param_groups"]
        ]
        return {**state, "version": STATE_VERSION, "optimizer": type(self).__name__, "noise": self.noise.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Strict, and by copy: two optimizers never share a state tensor."""
        self._check_state(state_dict)
        copies = {int(key): self._copy_state(int(key), saved) for key, saved in state_dict["state"].items()}
        groups = [
            {name: tuple(value) if name == "betas" else value for name, value in group.items()}
            for group in state_dict["param_groups"]
        ]
        super().load_state_dict({"state": copies, "param_groups": groups})
        self.noise.load_state_dict(state_dict["noise"])
        self.mean_gate = 1.0

    def _check_state(self, state: Mapping[str, Any]) -> None:
        name = type(self).__name__
        if state.get("version") != STATE_VERSION or state.get("optimizer") != name:
            raise StateError(
                f"{name} loads state version {STATE_VERSION} of {name}; this one says version {state.get('version')!r} "
                f"of {state.get('optimizer')!r}. Load it with the optimizer that wrote it, or start with a fresh one."
            )
        missing = {"state", "param_groups", "noise"} - set(state)
        if missing:
            raise StateError(f"{name} cannot load this state: {sorted(missing)} missing. The checkpoint is incomplete.")
        found = [len(group["params"]) for group in state["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if found != expected:
            raise StateError(f"{name} has groups of {expected} parameters; the state was saved with groups of {found}.")

    def _copy_state(self, index: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        param = [param for group in self.param_groups for param in group["params"]][index]
        expected = {"step", *self.buffers}
        if set(saved) != expected:
            raise StateError(f"State of parameter {index} holds {sorted(saved)}; expected {sorted(expected)}.")
        for name in self.buffers:
            if saved[name].shape != param.shape:
                raise StateError(
                    f"{name} of parameter {index} has shape {tuple(saved[name].shape)}, the parameter "
                    f"{tuple(param.shape)}. The state belongs to another network: start with a fresh optimizer."
                )
        return {"step": int(saved["step"]), **{name: saved[name].clone() for name in self.buffers}}

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle, which torch serves with less than the whole optimizer."""
        modes = {name: getattr(self, name) for name in ("gate", "protect", "adaptive_noise", "fused")}
        return {**super().__getstate__(), "modes": modes, "noise": self.noise.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "modes" in state:
            vars(self).update(state.pop("modes"))
            noise, self.noise = state.pop("noise"), NoisePool()
            self.noise.load_state_dict(noise)
            self.mean_gate, self.finite_only, self.step_taken, self.n_threads = 1.0, False, True, 1
        super().__setstate__(state)


def check_hyperparameters(optimizer: str, group: Mapping[str, Any]) -> None:
    """Numbers that cannot be meant are refused by name, NaN included."""
    for name in ("lr", "weight_decay", "sigma"):
        if not isinstance(group[name], int | float) or not 0.0 <= group[name] < math.inf:
            raise ConfigError(f"{optimizer}: {name}={group[name]!r} must be a finite number >= 0.")
    eps = group.get("eps", 1.0)
    if not isinstance(eps, int | float) or not 0.0 < eps < math.inf:
        raise ConfigError(f"{optimizer}: eps={eps!r} must be a finite number > 0: it keeps a zero gradient from 0/0.")
    betas = group.get("betas", ())
    if not isinstance(betas, tuple | list) or len(betas) not in (0, 2):
        raise ConfigError(f"{optimizer}: betas={betas!r} must be two numbers.")
    for name, value in [("beta_utility", group["beta_utility"]), *[("betas", beta) for beta in betas]]:
        if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
            raise ConfigError(f"{optimizer}: {name} has {value!r}; an averaging factor lies in [0, 1).")
