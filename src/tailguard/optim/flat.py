"""Parameters as views of one buffer, so that clipping and optimizer steps are a few large operations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ParameterVector:
    """All parameters of a module laid out in one tensor; the optimizer sees a single parameter.

    The module's parameters become views of it: in-place loads keep them so, replacing a parameter's storage
    (`module.to(device)`) does not and must happen before: see `holds`.

    Frozen parameters (`requires_grad=False`) lie in it as well, so that they can learn again at any time; whoever steps
    leaves them out (frozen.py).
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
        self.gradient = torch.zeros_like(self.flat.data)  # what `gather_gradients` fills
        self.written: dict[int, range] = {}  # first place of a span whose gradient is there, and its parameters

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

    def mark_written(self, start: int, stop: int) -> bool:
        """Say that native code puts the gradient of a span of whole parameters into `gradient` itself, and adds to it
        where this returns True: a gradient of that span is there already."""
        known = start in self.written
        self.written[start] = range(bisect_left(self.offsets, start), bisect_left(self.offsets, stop))
        return known

    def gather_gradients(self) -> Tensor:
        """The gradient of the flat parameter: spans that were written, and what parameters have got from torch.

        A parameter without a gradient counts as zero. Once per step; the tensor is the same every time.
        """
        written = {i for span in self.written.values() for i in span}
        for i, parameter in enumerate(self.parameters):
            if i in written and parameter.grad is None:
                continue
            own = self.gradient[self.offsets[i] : self.offsets[i + 1]]
            if i not in written:
                own.zero_()
            if parameter.grad is not None:
                own += parameter.grad.reshape(-1)
        self.flat.grad = self.gradient
        return self.gradient

    def drop_gradients(self) -> None:
        """zero_grad(set_to_none=True) for the module and the flat parameter."""
        for parameter in self.parameters:
            parameter.grad = None
        self.flat.grad = None
        self.written = {}

    def span(self, prefix: str) -> slice:
        """Where the parameters whose names start with `prefix` lie; they are neighbours by construction."""
        inside = [i for i, name in enumerate(self.names) if name.startswith(prefix)]
        return slice(self.offsets[inside[0]], self.offsets[inside[-1] + 1])

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
