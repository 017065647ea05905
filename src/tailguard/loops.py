"""What compiled loops share: how they are compiled, and a few things that Python has no word for.

No fastmath anywhere: its sums depend on the machine and on where arrays lie, and no run could be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

compiled: Any = njit(error_model="numpy", cache=True, nogil=True)
emitted: Any = intrinsic
Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]  # calls functions that share nothing, in any order


def one_by_one(pieces: Sequence[Callable[[], Any]]) -> list[Any]:
    return [piece() for piece in pieces]


@emitted  # type: ignore[untyped-decorator]
def fused_multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once: faster than two operations, and the same number on every machine."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), generate


@emitted  # type: ignore[untyped-decorator]
def wide_vectors(typing_context: Any) -> Any:
    """Let the loops of the function that calls this use the machine's widest vectors; LLVM would take half of them.

    Elements do not know how many of them are worked on at a time, so no result depends on it.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite knows no names with values
        return context.get_dummy_value()

    return types.void(), generate


@emitted  # type: ignore[untyped-decorator]
def arrays_apart(typing_context: Any) -> Any:
    """Promise that the arrays given to the function that calls this share no memory.

    LLVM would look before every loop, and take the slow one where rows of one array lie between those of another.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), generate
