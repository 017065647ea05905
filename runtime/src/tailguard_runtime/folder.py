"""The folder of a frozen policy: regular files of bounded sizes, compared with their checksums before they are parsed.

contract.json            what the policy is, sees and answers
weights.safetensors      arrays of the network
test_vector.safetensors  observations of a few steps, and what the agent made of them
step.onnx                one step as an ONNX graph, where it was exported; nothing here reads it
SHA256SUMS               checksum and name of each of these, as `sha256sum -c` reads it
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard_runtime.errors import FrozenPolicyError

CONTRACT, WEIGHTS, TEST_VECTOR, GRAPH, CHECKSUMS = (
    *("contract.json", "weights.safetensors", "test_vector.safetensors"),
    *("step.onnx", "SHA256SUMS"),
)
LARGEST = {CONTRACT: 2**22, WEIGHTS: 2**32, TEST_VECTOR: 2**28, CHECKSUMS: 2**12}
"""Bytes of each file; larger ones are refused before they are read."""
LARGEST_HEADER, MOST_ARRAYS = 2**20, 1_000
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "BOOL": np.dtype("?"),
}
LINE = re.compile(r"([0-9a-f]{64})  ([a-z_]+\.[a-z]+)")

Arrays = dict[str, NDArray[Any]]


def read_folder(folder: str | Path) -> tuple[Path, dict[str, bytes]]:
    """Where the folder is, and the bytes of its files that are read here, after every checksum has been compared."""
    place = Path(folder)
    waiting = place.with_name(f".{place.name}.previous")
    if not place.is_dir() and waiting.is_dir():
        place = waiting  # an export that was interrupted between the two renames that replace a folder
    if not place.is_dir():
        raise FrozenPolicyError(f"There is no folder {place}: give the one that `tailguard export` wrote.")
    lines = read_file(place / CHECKSUMS).decode("utf-8", "replace").splitlines()
    parsed = [LINE.fullmatch(line) for line in lines]
    sums = {found[2]: found[1] for found in parsed if found}
    needed = {CONTRACT, WEIGHTS, TEST_VECTOR}
    if None in parsed or len(sums) < len(lines) or not needed <= set(sums) <= needed | {GRAPH}:
        raise FrozenPolicyError(f"{place / CHECKSUMS} is damaged: it must name {', '.join(sorted(needed))}, each once.")
    files = {name: read_file(place / name) for name in sorted(needed)}
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != sums[name]:
            raise FrozenPolicyError(
                f"{place / name} is damaged: its checksum is not that of {CHECKSUMS}. Export the policy again."
            )
    return place, files


def read_file(path: Path) -> bytes:
    """The bytes of a regular file; a link, a pipe and a file of more than its largest size are refused unread."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise FrozenPolicyError(f"Cannot read {path}: {error.strerror}. The folder is incomplete.") from None
    with os.fdopen(handle, "rb") as file:
        found, limit = os.fstat(file.fileno()), LARGEST[path.name]
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise FrozenPolicyError(f"{path} is no regular file of at most {limit:,} bytes, so it is not read.")
        try:
            return file.read(limit + 1)
        except (OSError, MemoryError) as error:
            raise FrozenPolicyError(f"Cannot read {path}: {error}.") from None


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrozenPolicyError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise FrozenPolicyError(f"{path} holds a {type(parsed).__name__}, expected an object.")
    return parsed


def parse_arrays(data: bytes, path: Path) -> Arrays:
    """The arrays of a safetensors file: eight bytes of length, a JSON header, then the numbers."""
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else LARGEST_HEADER + 1
    header, body = data[8 : 8 + min(size, LARGEST_HEADER)], memoryview(data)[8 + size :]
    if size > LARGEST_HEADER or header.count(b"data_offsets") > MOST_ARRAYS:
        raise FrozenPolicyError(f"{path} has no header of at most {LARGEST_HEADER:,} bytes and {MOST_ARRAYS:,} arrays.")
    arrays: Arrays = {}
    for name, said in parse_json(header, path).items():
        if name == "__metadata__":
            continue
        try:
            dtype = DTYPES[said["dtype"]]
            begin, end = said["data_offsets"]
            shape = tuple(said["shape"])
            if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)) or not begin <= end <= len(body):
                raise ValueError("its place lies outside of the file")
            arrays[name] = np.frombuffer(body[begin:end], dtype).reshape(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise FrozenPolicyError(f"{path}: the array {name!r} cannot be read: {error}.") from None
    return arrays
