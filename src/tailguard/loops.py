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
BLOCK = 16  # rows and columns that are transposed at a time
Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]  # calls functions that share nothing, in any order


def one_by_one(pieces: Sequence[Callable[[], Any]]) -> list[Any]:
    return [piece() for piece in pieces]


def call_all(pieces: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of some functions returns; all of them are called, and only then is the first error raised."""
    results: list[Any] = []
    errors: list[BaseException] = []
    for piece in pieces:
        try:
            results.append(piece())
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


class Crew:
    """Who does several things: here one after the other, by the caller."""

    def run(self, pieces: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each of some functions that share nothing returns."""
        return one_by_one(pieces)

    def begin(self, piece: Callable[[], Any]) -> Callable[[], Any]:
        """Call a function that need not be called, if somebody has time; returns what waits for its end."""
        return lambda: None


ALONE = Crew()


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
    """Promise that the arrays given to the function that calls this share no memory, and that it keeps none of them.

    LLVM would look before every loop, and take the slow one where rows of one array lie between those of another.
    Rows of one array may be given: they share what counts references, so the function must leave that alone.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), generate


@emitted  # type: ignore[untyped-decorator]
def borrowed(typing_context: Any, value: Any) -> Any:
    """An array, or (named) tuples of arrays, that nobody counts references to: whoever lent them keeps them alive.

    Counts lie where the allocator puts them, often two threads' in one line of the cache. Every slice counts up and
    down, and then both threads wait for that line: a batch took twice as long, in one process of five.
    """

    def lend(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value)
            array.meminfo = array.meminfo.type(None)
            array.parent = array.parent.type(None)
            return array._getvalue()
        if isinstance(kind, types.BaseTuple):
            for i in range(len(kind)):
                lent = lend(context, builder, kind[i], builder.extract_value(value, i))  # type: ignore[index]
                value = builder.insert_value(value, lent, i)
        return value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return lend(context, builder, signature.args[0], values[0])

    return value(value), generate


@emitted  # type: ignore[untyped-decorator]
def add_one(typing_context: Any, address: Any) -> Any:
    """Count up the int64 at an address, which other threads count up too; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        count = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", count, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.intp), generate


@emitted  # type: ignore[untyped-decorator]
def latest(typing_context: Any, address: Any) -> Any:
    """The int64 at an address, fetched anew: another thread may have changed it."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.intp), generate


@emitted  # type: ignore[untyped-decorator]
def turn_block(typing_context: Any, source: Any, down: Any, target: Any, across: Any) -> Any:
    """Transpose BLOCK x BLOCK float32 from one address to another, rows that many bytes apart, within registers.

    Stage d swaps what lies d right of the diagonal blocks of size 2d with what lies d below it.
    """
    whole = types.intp

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), BLOCK)

        def row(k: int, first: Any, apart: Any) -> Any:
            at = builder.add(first, builder.mul(apart, ir.Constant(apart.type, k)))
            return builder.inttoptr(at, vector.as_pointer())

        def mixed(a: Any, b: Any, places: list[int]) -> Any:
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), places))

        rows = [builder.load(row(k, *values[:2]), align=4) for k in range(BLOCK)]
        for d in (1, 2, 4, 8):
            for k in range(BLOCK):
                if k & d == 0:
                    a, b = rows[k], rows[k + d]
                    rows[k] = mixed(a, b, [j if j & d == 0 else BLOCK + j - d for j in range(BLOCK)])
                    rows[k + d] = mixed(a, b, [j + d if j & d == 0 else BLOCK + j for j in range(BLOCK)])
        for k in range(BLOCK):
            builder.store(rows[k], row(k, *values[2:]), align=4)
        return context.get_dummy_value()

    return types.void(whole, whole, whole, whole), generate
