"""What compiled loops share: how they are compiled, and two things that Python has no word for.

No fastmath anywhere: its sums depend on the machine and on where arrays lie, and no run could be repeated.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

compiled: Any = njit(error_model="numpy", cache=True, nogil=True)
emitted: Any = intrinsic


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
