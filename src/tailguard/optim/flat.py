"""Parameters as views of one buffer, so that clipping and optimizer steps are a few large operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ParameterVector:
    """All parameters of a module laid out in one tensor; the optimizer sees a single parameter.

    The module's parameters become views of it: in-place loads keep them so, replacing a parameter's storage
    (`module.to(device)`) does not and must happen before: see `holds`.

    Frozen parameters (`requires_grad=False`) lie in it as well, so that they can learn again at any time; steps
    leave them out (frozen.py).
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters]))
        self.offsets = [0]
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            start = self.offsets[-1]
            parameter.data = self.flat.data[start : start + size].view_as(parameter)
            self.offsets.append(start + size)
        self.gradient = torch.zeros_like(self.flat.data)
        self.gradients = [
            self.gradient[start : start + size].view_as(parameter)
            for start, size, parameter in zip(self.offsets, self.sizes, self.parameters, strict=False)
        ]

    def zero_gradients(self) -> None:
        """Zero the flat gradient and let every parameter's `grad` be its view, so that backward passes add to it."""
        self.gradient.zero_()
        self.flat.grad = self.gradient
        for parameter, view in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = view if parameter.requires_grad else None

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's parameters are still these, where they were put: nobody has replaced one."""
        own = list(module.parameters())
        first, size = self.flat.data_ptr(), self.flat.element_size()
        return len(own) == len(self.parameters) and all(
            parameter is mine and parameter.data_ptr() == first + size * offset and parameter.is_contiguous()
            for parameter, mine, offset in zip(own, self.parameters, self.offsets, strict=False)
        )

    @property
    def frozen(self) -> list[int]:
        """Which of the parameters are to stay as they are."""
        return [i for i, parameter in enumerate(self.parameters) if not parameter.requires_grad]

    def span(self, prefix: str) -> slice:
        """Where the parameters whose names start with `prefix` lie; they are neighbours by construction."""
        inside = [i for i, name in enumerate(self.names) if name.startswith(prefix)]
        return slice(self.offsets[inside[0]], self.offsets[inside[-1] + 1])

    def offset(self, parameter: Tensor) -> int:
        """Where one parameter begins in the flat tensor."""
        return int(self.where(parameter).start)

    def where(self, parameter: Tensor) -> slice:
        """Where one parameter lies in the flat tensor and in an optimizer's moments of it."""
        index = next(i for i, own in enumerate(self.parameters) if own is parameter)
        return slice(self.offsets[index], self.offsets[index + 1])


def rescale_moments(state: dict[str, Tensor], spans: Sequence[slice], gradient: float, weight: float) -> None:
    """Multiply kept gradients by `gradient`, their squares by its square, utilities (gradient times weight) by both."""
    powers = {
        "exp_avg": gradient,
        "first_moment": gradient,
        "momentum_buffer": gradient,
        "exp_avg_sq": gradient**2,
        "max_exp_avg_sq": gradient**2,
        "sec_moment": gradient**2,
        "avg_utility": gradient * weight,
    }
    for name, factor in powers.items():
        kept = state.get(name)
        if kept is not None and factor != 1.0:
            for span in spans:
                kept[span] *= factor
