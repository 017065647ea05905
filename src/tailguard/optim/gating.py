"""What the UPGD family shares: utility, gate, noise, and the state of an optimizer that saves all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tailguard.errors import ConfigError, StateError, did_you_mean
from tailguard.optim.batches import Batch, GateRange, Group, Part, StepNoise, Views
from tailguard.optim.kernels import Array
from tailguard.optim.noise import NoisePool

Gate = Literal["max", "minmax"]
Protect = Literal["weights", "noise"]

STATE_VERSION = 1
MODES: dict[str, tuple[str, ...]] = {"gate": ("max", "minmax"), "protect": ("weights", "noise")}


class GatedOptimizer(Optimizer):
    """Base of UPGD, AdaptiveUPGD and UPGDW: a step whose direction each weight takes according to its utility.

    A subclass names its state, updates it (`_track`) and says where the step goes (`_direction`), each in torch
    for any tensor and in a fused kernel for contiguous float32 tensors on the CPU.
    """

    scale_free: ClassVar[bool]
    """Whether a factor on the gradient cancels: then whoever damps the gradient must damp the step instead."""
    buffers: ClassVar[tuple[str, ...]]
    """Names of the state tensors, each shaped like its parameter."""

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
        self._gate_sums: list[Tensor | float] = []
        self._gate_count = 0
        self._positions: dict[Tensor, int] = {}
        self._views: dict[Tensor, Views] = {}
        params = list(params)
        if not params:
            raise ConfigError(
                f"{type(self).__name__} got no parameters. Pass module.parameters() of a non-empty module."
            )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        check_hyperparameters(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                raise ConfigError(f"{type(self).__name__} needs real floating point parameters, found {param.dtype}.")
        self._positions = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: update the averages, compare every utility with the best, then move."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.advance()
        return loss

    @property
    def watched(self) -> bool:
        """Somebody hangs on `step`: a hook, a learning-rate scheduler, a subclass with a step of its own."""
        step = type(self).step
        replaced = "step" in vars(self) or getattr(step, "__wrapped__", step) is not GatedOptimizer.step
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks)
        return replaced or any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))

    @torch.no_grad()
    def advance(self) -> None:
        """The step itself, without the profiler's records and the hooks that torch wraps around `step`."""
        batches = self.batches()
        if batches:
            extremes = [self._track(batch) for batch in batches]
            gates = self._gate_range(batches, extremes)
            noise = self.draw_noise(batches)
            self._gate_sums = [self._move(batch, gates, noise) for batch in batches]
            self._gate_count = sum(param.numel() for batch in batches for param in batch.params)

    @property
    def mean_gate(self) -> float:
        """Mean gate of the last step: the learning rate it used, in units of the nominal one. Reading it syncs."""
        if not self._gate_sums:
            return 1.0
        return sum(float(total) for total in self._gate_sums) / self._gate_count

    # What a subclass defines

    def _track(self, batch: Batch) -> tuple[float, float]:
        """Update the averages of this batch; returns (min, max) of its uncorrected utility average."""
        raise NotImplementedError

    def _direction(self, batch: Batch) -> list[Tensor]:
        """Where the base optimizer would go, per unit of learning rate; new tensors, or the gradients themselves."""
        raise NotImplementedError

    def _move_fused(self, batch: Batch, centre: float, width: float, noise: StepNoise | None) -> float:
        """Move the parameters of a fused batch; returns the sum of the gates."""
        raise NotImplementedError

    def _decay(self, group: Group) -> float:
        """What the weights are multiplied with before the step."""
        return 1.0 - float(group["lr"]) * float(group["weight_decay"])

    # The gate

    def _gate_range(self, batches: list[Batch], extremes: list[tuple[float, float]]) -> GateRange:
        """Extremes over all parameters of the bias-corrected utilities, as centre and width of the gate."""
        low = min(low / batch.correction for batch, (low, _) in zip(batches, extremes, strict=True))
        high = max(high / batch.correction for batch, (_, high) in zip(batches, extremes, strict=True))
        if self.gate == "max":  # no weight is of use: nothing to compare with, so nobody is protected
            return GateRange(0.0, high if high > 0 else math.inf)
        # utilities that differ by rounding alone are equal, whatever their size
        rounding = 8 * max(torch.finfo(batch.params[0].dtype).eps for batch in batches) * max(abs(high), abs(low))
        return GateRange((high + low) / 2, (high - low) / 2 if high - low > rounding else math.inf)

    # Noise

    def draw_noise(self, batches: list[Batch]) -> StepNoise | None:
        """Where the next step reads its noise; None where there is none."""
        if all(group["sigma"] == 0 for group in self.param_groups):
            return None
        offset, sign = self.noise.draw(self._total())
        return StepNoise(offset, sign * (self._direction_rms(batches) if self.adaptive_noise else 1.0))

    def _direction_rms(self, batches: list[Batch]) -> float:
        """Root mean square of the direction over all parameters: independent of how they are cut into tensors."""
        norms = [torch.stack(torch._foreach_norm(self._direction(batch))).double().square().sum() for batch in batches]
        count = sum(param.numel() for batch in batches for param in batch.params)
        return math.sqrt(sum(float(norm) for norm in norms) / count)

    def _noise_of(self, batch: Batch, noise: StepNoise) -> list[Tensor]:
        """A view of the pool for each parameter, shaped like it."""
        pool = self.noise.read(batch.params[0].device, batch.params[0].dtype)
        return [
            pool[noise.offset + at : noise.offset + at + param.numel()].view(param.shape)
            for at, param in zip(batch.positions, batch.params, strict=True)
        ]

    def _total(self) -> int:
        return sum(param.numel() for group in self.param_groups for param in group["params"])

    # Moving

    def _move(self, batch: Batch, gates: GateRange, noise: StepNoise | None) -> Tensor | float:
        """Decay, then step along the gated direction; returns the sum of the gates."""
        centre, width = gates.centre * batch.correction, gates.width * batch.correction
        if batch.fused:
            total = self._move_fused(batch, centre, width, noise)
            torch.autograd.graph.increment_version(batch.params)  # numba writes behind autograd's back
            return total
        return self._move_torch(batch, centre, width, noise)

    def note_moves(self, batch: Batch, gates: list[float]) -> None:
        """Somebody else has moved a fused batch, which is all there is; gates: sums of the last step's, by share."""
        torch.autograd.graph.increment_version(batch.params)
        self._gate_sums, self._gate_count = [sum(gates)], sum(param.numel() for param in batch.params)

    def _move_torch(self, batch: Batch, centre: float, width: float, noise: StepNoise | None) -> Tensor:
        gate = list(torch._foreach_sub(batch.column("avg_utility"), centre))
        torch._foreach_div_(gate, -width)
        torch._foreach_sigmoid_(gate)
        torch._foreach_mul_(gate, 2.0)
        step = list(torch._foreach_mul(self._direction(batch), 1.0))
        if noise is not None:
            kick = torch._foreach_mul(self._noise_of(batch, noise), batch.group["sigma"] * noise.size)
            if self.protect == "noise":
                torch._foreach_mul_(kick, gate)
            torch._foreach_add_(step, kick)
        if self.protect == "weights":
            torch._foreach_mul_(step, gate)
        torch._foreach_mul_(batch.params, self._decay(batch.group))
        torch._foreach_add_(batch.params, step, alpha=-batch.group["lr"])
        return torch.stack(torch._foreach_norm(gate, 1)).sum()

    def _fused_numbers(self, batch: Batch, noise: StepNoise | None) -> list[float]:
        """Rate, decay, sigma: what every moving kernel takes."""
        sigma = batch.group["sigma"] * noise.size if noise is not None else 0.0
        return [batch.group["lr"], self._decay(batch.group), sigma]

    def _fused_noise(self, batch: Batch, noise: StepNoise | None) -> list[Array]:
        """Noise per parameter; without noise any finite array serves, because the kernel multiplies it with zero."""
        if noise is None:
            return [part.arrays[2] for part in batch.parts]
        pool = self.noise_pool(batch)[noise.offset :]
        return [pool[part.place : part.place + part.arrays[0].size] for part in batch.parts]

    def noise_pool(self, batch: Batch) -> Array:
        """All that a fused batch's noise is read from."""
        pool: Array = self.noise.read(batch.params[0].device, batch.params[0].dtype).numpy()
        return pool

    # Collecting what steps

    def batches(self) -> list[Batch]:
        """Parameters with a gradient, their state made when first seen and their step counted."""
        positions = self._positions or self._find_positions()
        batches: dict[tuple[Any, ...], Batch] = {}
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None or param.numel() == 0:
                    continue
                self._check_gradient(param.grad)
                state = self._state_of(param)
                state["step"] += 1
                fused = self.fused and is_fusable(param)
                if not fused:
                    self._views.pop(param, None)
                key = (index, state["step"], fused, param.device, param.dtype)
                if key not in batches:
                    batches[key] = Batch(group, state["step"], fused, [], [], [], [], [])
                batch = batches[key]
                batch.params.append(param)
                batch.grads.append(param.grad)
                batch.states.append(state)
                batch.positions.append(positions[param])
                if fused:
                    batch.parts.append(Part(positions[param], self._arrays_of(param, param.grad, state)))
        return list(batches.values())

    def _arrays_of(self, param: Tensor, gradient: Tensor, state: dict[str, Any]) -> list[Array]:
        """Parameter, gradient and buffers."""
        tensors = [param, *(state[name] for name in self.buffers)]
        addresses = [param.numel(), *(tensor.data_ptr() for tensor in tensors)]
        views = self._views.get(param)
        if views is None or views.addresses != addresses:
            views = self._views[param] = Views(addresses, [flat(tensor) for tensor in tensors])
        own, *buffers = views.arrays
        return [own, flat(gradient), *buffers]

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = 0
            for name in self.buffers:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def _find_positions(self) -> dict[Tensor, int]:
        at = 0
        for group in self.param_groups:
            for param in group["params"]:
                self._positions[param] = at
                at += param.numel()
        return self._positions

    def _check_gradient(self, grad: Tensor) -> None:
        if grad.is_sparse or grad.layout != torch.strided:
            raise ConfigError(
                f"{type(self).__name__} needs dense gradients: a utility compares every weight with every other. "
                "Build the embedding with sparse=False."
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
        self._gate_sums, self._gate_count = [], 0

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
            self._gate_sums, self._gate_count, self._positions, self._views = [], 0, {}, {}
        super().__setstate__(state)


def flat(tensor: Tensor) -> Array:
    """A CPU tensor as a one-dimensional array: on the same memory when it is contiguous, as a copy otherwise."""
    return tensor.detach().numpy().reshape(-1)


def extremes_of(found: list[tuple[float, float]]) -> tuple[float, float]:
    """(min, max) over all parts."""
    return min(low for low, _ in found), max(high for _, high in found)


def is_fusable(param: Tensor) -> bool:
    return param.is_cpu and param.dtype is torch.float32 and param.is_contiguous()


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


def track_utility(batch: Batch, gate: Gate) -> tuple[float, float]:
    """avg_utility <- beta avg_utility + (1 - beta) (-g w); returns its (min, max), the min only where it is used."""
    utility, beta = batch.column("avg_utility"), batch.group["beta_utility"]
    torch._foreach_mul_(utility, beta)
    torch._foreach_addcmul_(utility, batch.grads, batch.params, -(1.0 - beta))
    high = float(torch.stack(torch._foreach_max(utility)).max())
    low = -float(torch.stack(torch._foreach_max(torch._foreach_neg(utility))).max()) if gate == "minmax" else high
    return low, high
