"""Files that anybody may have written or edited: regular ones of a bounded size, and JSON without its traps."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tailguard.errors import ConfigError, TailguardError

LARGEST_TEXT = 2**20
"""Bytes of a configuration, a manifest and other files that people read."""
LARGEST_LINES = 2**30
"""Bytes of a file that grows by a line per event."""
LARGEST_NUMBER = 2**63
LONGEST_NAME, LONGEST_PATH = 200, 2000
"""Characters in UTF-8: systems allow 255 and 4,096, and endings such as -seed-12 and temporary names come on top."""

Raises = type[TailguardError]


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_regular(path: str | Path, largest: int, error: Raises) -> bytes:
    """The bytes of a regular file. A pipe, a device, a folder and a file of more than `largest` bytes are refused
    before they are read: they could be waited for, or read, without end."""
    place = Path(path)
    with open_regular(place, error) as file:
        try:
            data = file.read(largest + 1)
        except (OSError, MemoryError) as problem:
            raise error(f"Cannot read {place}: {reason(problem)}.") from None
        size = max(os.fstat(file.fileno()).st_size, len(data))
    if len(data) > largest:
        raise error(f"{place} has {size:,} bytes; such a file has at most {largest:,}. Is it the file that was meant?")
    return data


def open_regular(path: str | Path, error: Raises) -> BinaryIO:
    """A regular file, open for reading; opening a pipe in the usual way would wait for somebody to write."""
    place = Path(path)
    try:
        handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise error(f"There is no file {shown(place)!r}.") from None
    except (OSError, ValueError) as problem:
        raise error(f"Cannot read {shown(place)!r}: {reason(problem)}.") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise error(f"{place} is {kind_of(mode)}, not a regular file. Copy what it gives into a file.")
    return os.fdopen(handle, "rb")


def read_text(path: str | Path, largest: int, error: Raises) -> str:
    """The text of a regular file in UTF-8."""
    data = read_regular(path, largest, error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start}). Save it as UTF-8.") from None


def read_json(path: str | Path, error: Raises, largest: int = LARGEST_TEXT) -> dict[str, Any]:
    """The object that a JSON file holds; an error names the file and what is wrong with it."""
    return json_object(read_regular(path, largest, error), str(path), error)


def read_json_lines(
    path: str | Path, error: Raises, torn_end: bool = True, largest: int = LARGEST_LINES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of every line of a file of JSON lines; blank lines are left out.

    torn_end: a last line without its line feed was cut off by a kill and never happened; otherwise it counts
    """
    *lines, rest = read_regular(path, largest, error).split(b"\n")
    for number, line in enumerate([*lines, b"" if torn_end else rest], 1):
        if line.strip():
            yield number, json_object(line, line_name(path, number), error)


def line_name(path: str | Path, number: int) -> str:
    """How errors name a line."""
    return f"{path}, line {number}"


def json_object(data: bytes, where: str, error: Raises, or_nan: bool = False) -> dict[str, Any]:
    """A JSON object in which no key comes twice, every number is finite and of a usual size, and all text is text.

    NaN and Infinity are no JSON; Python's parser would take them, and the last of two equal keys, and half a character.
    or_nan: files of earlier versions hold NaN
    """
    try:
        parsed = json.loads(
            data,
            object_pairs_hook=without_repeats,
            parse_constant=float if or_nan else refuse_constant,
            parse_float=finite_float,
            parse_int=usual_int,
        )
        if b"\\ud" in data.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        what = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise error(f"{where} is not valid JSON: {what}. It begins {data[:60]!r}.") from None
    if not isinstance(parsed, dict):
        raise error(f"{where} holds {str(parsed)[:60]!r}; expected an object, such as {{...}}.")
    return parsed


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} is given twice")
    return found


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def finite_float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"the number {text[:60]} is too large")
    return value


def usual_int(text: str) -> int:
    value = int(text) if len(text) <= 20 else LARGEST_NUMBER
    if not -LARGEST_NUMBER <= value < LARGEST_NUMBER:
        raise ValueError(f"the number {text[:60]} is too large")
    return value


class Fields:
    """The fields of a parsed object, read with their types; an error names the file, the line and the field."""

    def __init__(self, values: Mapping[str, Any], where: str, error: Raises) -> None:
        self.values, self.where, self.error = values, where, error

    def wrong(self, name: str, expected: str) -> TailguardError:
        if name not in self.values:
            return self.error(f"{self.where} has no {name!r}; expected {expected}. Restore it from a copy.")
        found = str(self.values[name])[:60]
        return self.error(f"{self.where}: {name} is {found!r}; expected {expected}. Restore it from a copy.")

    def count(self, name: str, below: int | None = None) -> int:
        """A whole number from 0 on."""
        value = self.values.get(name)
        if type(value) is not int or value < 0 or (below is not None and value >= below):
            raise self.wrong(name, "a whole number from 0" + ("" if below is None else f" to {below - 1}"))
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if type(value) not in (int, float):
            raise self.wrong(name, "a number")
        return float(value)  # type: ignore[arg-type]

    def number_or_none(self, name: str) -> float | None:
        if name in self.values and self.values[name] is None:
            return None
        value = self.values.get(name)
        if type(value) not in (int, float):
            raise self.wrong(name, "a number or null")
        return float(value)  # type: ignore[arg-type]

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if name in self.values and self.values[name] is None else self.text(name)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def numbers(self, name: str, or_null: bool = False) -> dict[str, Any]:
        """An object of numbers; with `or_null` some of them may be unknown."""
        found = self.mapping(name)
        if not all(type(value) in (int, float) or (or_null and value is None) for value in found.values()):
            raise self.wrong(name, "an object of numbers")
        return found


T = TypeVar("T")
KINDS: dict[Any, Any] = {"int": int, "float": int | float, "str": str, "bool": bool}


def of_its_types(record: T) -> T:
    """A dataclass whose plain fields have the types that it declares; a TypeError names the one that has not."""
    for field in fields(record):  # type: ignore[arg-type]
        kind, value = KINDS.get(field.type), getattr(record, field.name)
        if kind is not None and not isinstance(value, kind):
            raise TypeError(f"{field.name} is {str(value)[:60]!r}, expected {field.type}")
    return record


def refuse_unusable_path(path: str | Path, error: Raises = ConfigError, what: str = "The name") -> None:
    """Refuse names that no file system takes, or that end where nobody looks: said before anything is written."""
    text = str(path)
    advice = "Choose a shorter or plainer one."
    if not text.strip():
        raise error(f"{what} is empty. Give one, such as first.")
    unprintable = next((mark for mark in text if not mark.isprintable()), None)
    if unprintable is not None:
        raise error(f"{what} {shown(text)} holds the character {unprintable!r}, which no name should. {advice}")
    long = next((part for part in Path(text).parts if len(part.encode()) > LONGEST_NAME), None)
    if long is not None:
        raise error(f"{what} {shown(long)} has {len(long.encode())} bytes; at most {LONGEST_NAME} fit. {advice}")
    if len(text.encode()) > LONGEST_PATH:
        raise error(f"{what} {shown(text)} has {len(text.encode()):,} bytes; at most {LONGEST_PATH:,} fit. {advice}")


def shown(path: str | Path) -> str:
    """A path in a message: one that is very long is cut, what cannot be printed is escaped."""
    text = str(path)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 120 else f"{text[:80]}...({len(text)} characters)"


def reason(problem: Exception) -> str:
    """What the system says of a file."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


def kind_of(mode: int) -> str:
    """What a file is, in words."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
