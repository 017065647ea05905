"""Ways to spoil bytes, text and trees, each a function of a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

SNIPPETS: Sequence[bytes] = (
    b"", b"0", b"-1", b"1e999", b"nan", b"inf", b"9" * 40, b"9" * 5000, b"null", b"true", b'"', b"'", b",", b";", b"\t",
    b"\n", b"\r\n", b"\0", b"\x07", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"{", b"}", b"[", b"]", b": ", b"- ",
    b"&a ", b"*a",
    b"!!python/object/apply:os.system ", b"<<: ", b"%", b"\xc3\xa9", b"..", b"/", b"../../etc/passwd", b"2024-02-30",
    b"[" * 2000,
    b"9999-12-31 23:59", b"0001-01-01", b"+99:99", b"1.5.2", b"1,000.5", b"\\ud800", b"a" * 300,
)  # fmt: skip
VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 10**26, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"), "",
    "x",
    "a" * 300, "\0", "\ud800", "../..", [], {}, [1], [[]], {"a": 1}, {"": {}}, ["x"] * 50, "1", "nan", "2024-01-01",
)  # fmt: skip


def spoiled(data: bytes, rng: random.Random, most: int = 3) -> bytes:
    """Bytes with one to `most` changes: insertions, deletions, flips, repeats, cuts, lines moved."""
    for _ in range(rng.randint(1, most)):
        data = rng.choice(BYTE_CHANGES)(data or b"a", rng)
    return data


def inserted(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(SNIPPETS) + data[at:]


def replaced(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(SNIPPETS) + data[at + rng.randint(1, 12) :]


def flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut_short(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if rng.random() < 0.3 else data


def line_changed(data: bytes, rng: random.Random) -> bytes:
    """A line twice, lost, moved, or another in its place."""
    lines = data.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        lines.insert(b, lines[a])
    elif kind == 1:
        del lines[a]
    elif kind == 2:
        lines[a], lines[b] = lines[b], lines[a]
    else:
        lines[a] = lines[b]
    return b"\n".join(lines)


def cell_changed(data: bytes, rng: random.Random) -> bytes:
    """One field between separators replaced: what a person does in a spreadsheet or an editor."""
    separator = rng.choice([b",", b": ", b'"', b"\n", b" "])
    cells = data.split(separator)
    cells[rng.randrange(len(cells))] = rng.choice(SNIPPETS)
    return separator.join(cells)


BYTE_CHANGES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    inserted,
    replaced,
    flipped,
    cut_short,
    line_changed,
    line_changed,
    cell_changed,
    cell_changed,
)


def spoiled_tree(tree: Any, rng: random.Random) -> Any:
    """Nested plain values with one change somewhere: another value, a key lost, renamed or new, an element twice."""
    path: list[Any] = []
    node = tree
    while isinstance(node, dict | list) and node and rng.random() < 0.85:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append(key)
        node = node[key]
    return changed_at(tree, path, rng)


def changed_at(tree: Any, path: list[Any], rng: random.Random) -> Any:
    if not path:
        return rng.choice(VALUES)
    key, *rest = path
    if isinstance(tree, dict):
        kind = rng.randrange(6) if not rest else 0
        if kind == 1:
            return {name: value for name, value in tree.items() if name != key}
        if kind == 2:
            return {(f"{name}x" if name == key else name): value for name, value in tree.items()}
        if kind == 3:
            return {**tree, "unheard_of": rng.choice(VALUES)}
        return {**tree, key: changed_at(tree[key], rest, rng)}
    if not rest and rng.random() < 0.3:
        return [*tree, tree[key]] if rng.random() < 0.5 else [*tree[:key], *tree[key + 1 :]]
    return [changed_at(part, rest, rng) if i == key else part for i, part in enumerate(tree)]
