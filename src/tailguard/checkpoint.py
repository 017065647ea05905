"""Bundles: an agent on disk as tensors in safetensors and everything else in JSON. Nothing is ever unpickled.

A bundle is a directory of `state.safetensors`, `tree.json`, `manifest.json` and `manifest.sha256`. It is written beside
its place, synced, and moved there whole; the manifest names size and sha256 of every file, so damage is found on load.
Replacing a bundle takes two renames; between them the earlier one waits as `.NAME.previous`, and readers look there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as render_tensors

from tailguard.errors import CheckpointError, DamagedCheckpointError
from tailguard.files import physical_memory

FORMAT = "tailguard-bundle"
SCHEMA_VERSION = 2
OLDEST_SCHEMA = 1
TENSORS, TREE, MANIFEST, DIGEST = "state.safetensors", "tree.json", "manifest.json", "manifest.sha256"
LARGEST_JSON = 64 * 2**20
MOST_VALUES = 2_000_000
"""In one JSON file of a bundle: more would take minutes to read, and no agent has a hundredth of it."""
MOST_TENSORS = 100_000
LARGEST_HEADER = 32 * 2**20
"""Of the file of tensors: it names each of them with its type and shape."""


def write_bundle(directory: str | Path, tree: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write one bundle atomically; an earlier one of the same name is replaced only when the new one is complete."""
    return write_folder(Path(directory), render(tree, about), MANIFEST, "bundle")


def write_folder(place: Path, files: Mapping[str, bytes], known_by: str, kind: str) -> Path:
    """Write a folder of files atomically and durably; one there before is replaced if it holds the file `known_by`."""
    with named_failure(place, sum(map(len, files.values()))):
        refuse_foreign(place, known_by, kind)
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        try:
            for name, data in files.items():
                write_synced(fresh / name, data)
            os.chmod(fresh, 0o755)  # noqa: S103 (mkdtemp makes it private; a bundle is as readable as its folder)
            sync_directory(fresh)
            put_in_place(fresh, place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return place


def render(tree: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a bundle."""
    tensors: dict[str, torch.Tensor] = {}
    files = {
        TREE: json.dumps(encode(tree, "", tensors), allow_nan=True).encode(),
        TENSORS: render_tensors(tensors),
    }
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "files": {name: {"bytes": len(data), "sha256": digest(data)} for name, data in files.items()},
        **about,
    }
    files[MANIFEST] = json.dumps(manifest, indent=1).encode()
    for name in (TREE, MANIFEST):
        refuse_oversized_json(files[name], Path(name))
    refuse_oversized_header(files[TENSORS], Path(TENSORS))  # what could not be read back is not written
    files[DIGEST] = digest(files[MANIFEST]).encode()
    return files


def put_in_place(fresh: Path, place: Path) -> None:
    """Move a complete bundle to its name; what stood there steps aside first and is removed last."""
    previous = previous_of(place)
    if place.exists():
        shutil.rmtree(previous, ignore_errors=True)  # of a crash long ago: what stands in place is newer
        os.rename(place, previous)
    os.rename(fresh, place)
    sync_directory(place.parent)
    shutil.rmtree(previous, ignore_errors=True)


def previous_of(place: Path) -> Path:
    """Where a bundle waits while it is being replaced."""
    return place.with_name(f".{place.name}.previous")


def recover(place: Path) -> None:
    """Finish what a crash interrupted: a bundle that stepped aside for one that never came returns to its name."""
    previous = previous_of(place)
    if previous.is_dir() and not place.exists():
        os.rename(previous, place)
        sync_directory(place.parent)


def remove_bundle(place: Path) -> None:
    """Delete a bundle so that a crash leaves either all of it or nothing under its name."""
    doomed = place.with_name(f".{place.name}-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    with named_failure(place, 0):
        os.rename(place, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def refuse_foreign(place: Path, known_by: str = MANIFEST, kind: str = "bundle") -> None:
    """Replace folders of one kind only: a folder or file of something else is not ours to remove."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise CheckpointError(f"{place} is a file or a link; a {kind} is a directory. Choose another name.")
    if place.is_dir() and not (place / known_by).exists() and any(place.iterdir()):
        raise CheckpointError(
            f"{place} exists and is not a {kind}, so it is not replaced. Choose another name, such as {place}/agent."
        )


@contextmanager
def named_failure(place: Path, n_bytes: int) -> Iterator[None]:
    """Turn an error of the file system into one that names the place, the space it needs and the space there is."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {place}: {error.strerror or error}. It needs {n_bytes:,} bytes, {free_bytes(place)} are "
            "free. What was saved before is untouched; make room or choose another folder, then go on from there."
        ) from error


def free_bytes(place: Path) -> str:
    """Free space where `place` would be, in words."""
    for folder in (place, *place.parents):
        try:
            return f"{shutil.disk_usage(folder).free:,}"
        except OSError:
            continue
    return "an unknown number"


def read_bundle(directory: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree and the manifest of a bundle, after every checksum has been compared."""
    place = existing(Path(directory))
    manifest = read_manifest(place)
    files = {name: read_checked(place / name, manifest) for name in (TREE, TENSORS)}
    refuse_oversized_header(files[TENSORS], place / TENSORS)
    try:
        tensors = parse_tensors(files[TENSORS])
    except Exception as error:  # whatever a parser says of foreign bytes, they are not a bundle
        raise CheckpointError(f"{place / TENSORS} cannot be parsed: {error}.") from None
    tree = parse_json(files[TREE], place / TREE)
    try:
        return decode(tree, tensors), manifest
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{place / TREE} does not hold a tree of state: {error}.") from None


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """What a bundle says about itself, after its digest has been compared."""
    place = existing(Path(directory))
    data = read_limited(place / MANIFEST, LARGEST_JSON)
    if digest(data) != read_limited(place / DIGEST, 1024).decode(errors="replace").strip():
        raise DamagedCheckpointError(f"{place / MANIFEST} is damaged: its sha256 differs from {DIGEST}.")
    manifest = parse_json(data, place / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{place} is not a bundle of this package: format is {manifest.get('format')!r}.")
    version, files = manifest.get("schema_version"), manifest.get("files")
    if type(version) is not int or not OLDEST_SCHEMA <= version <= SCHEMA_VERSION:
        raise CheckpointError(
            f"{place} has schema version {version!r}, this package reads {OLDEST_SCHEMA} to {SCHEMA_VERSION}. "
            "Use the version of the package that wrote it, or a newer one."
        )
    if not isinstance(files, dict) or set(files) != {TREE, TENSORS}:
        raise CheckpointError(f"{place / MANIFEST} must describe {TREE} and {TENSORS}, and nothing else.")
    return manifest


def existing(place: Path) -> Path:
    """The directory of a bundle: under its name, or waiting aside while it is replaced."""
    if place.is_dir():
        return place
    if previous_of(place).is_dir():
        return previous_of(place)
    if place.is_file():
        zipped = place.suffix == ".zip" or first_bytes(place, 2) == b"PK"
        reason = (
            " It looks like a Stable-Baselines3 zip: those hold pickles, which can run any code when read, so they are "
            "never opened (docs/security.md)."
            if zipped
            else ""
        )
        raise CheckpointError(f"{place} is a file; a bundle is a directory written by save().{reason}")
    raise CheckpointError(f"There is no bundle at {place}: it must be a directory written by save().")


def first_bytes(file: Path, count: int) -> bytes:
    """Of a file that may be of any size; nothing of one that cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(count)
    except OSError:
        return b""


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of a tree; tensors and arrays leave through `tensors` under their path."""
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        tensors[path] = tensor.contiguous().clone()
        return {"$tensor" if isinstance(value, torch.Tensor) else "$array": path}
    if isinstance(value, Mapping):
        items = [(key, encode(item, f"{path}/{key}", tensors)) for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
        return dict(items) if plain else {"$items": [[key, item] for key, item in items]}
    if isinstance(value, list | tuple):
        items_list = [encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {"$tuple": items_list} if isinstance(value, tuple) else items_list
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{path}: a {type(value).__name__} cannot be stored in a bundle; use tensors, numbers or text."
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$tensor"} or set(value) == {"$array"}:
        ((kind, path),) = value.items()
        if path not in tensors:
            raise CheckpointError(f"The tensor {path!r} is missing from {TENSORS}.")
        return tensors[path] if kind == "$tensor" else tensors[path].numpy()
    if set(value) == {"$items"}:
        return {key: decode(item, tensors) for key, item in value["$items"]}
    if set(value) == {"$tuple"}:
        return tuple(decode(item, tensors) for item in value["$tuple"])
    return {key: decode(item, tensors) for key, item in value.items()}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def state_digest(tree: Mapping[str, Any]) -> str:
    """One sha256 over a whole tree of state, for golden runs and proofs of exact resume."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(tree, "", tensors), sort_keys=True)
    return digest(text.encode() + render_tensors(tensors))


def read_checked(path: Path, manifest: Mapping[str, Any]) -> bytes:
    """A file's bytes, after size and checksum have been compared with the manifest."""
    try:
        expected = manifest["files"][path.name]
        size, checksum = int(expected["bytes"]), str(expected["sha256"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path.parent / MANIFEST} does not describe {path.name}.") from None
    data = read_limited(path, min(size, LARGEST_JSON) if path.suffix == ".json" else size)
    if len(data) != size or digest(data) != checksum:
        raise DamagedCheckpointError(f"{path} is damaged: {len(data)} bytes with another sha256 than the manifest's.")
    return data


def read_limited(path: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes."""
    try:
        if path.is_symlink() or not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing or not a regular file: the bundle is incomplete.")
        size = path.stat().st_size
        if size > limit:
            raise DamagedCheckpointError(f"{path} is damaged: {size:,} bytes are more than the {limit:,} expected.")
        if size > physical_memory():
            raise CheckpointError(f"{path} has {size:,} bytes, more than the memory of this machine.")
        return path.read_bytes()
    except (OSError, MemoryError) as error:
        unreadable_disk = isinstance(error, OSError) and error.errno == errno.EIO
        kind = DamagedCheckpointError if unreadable_disk else CheckpointError
        raise kind(f"Cannot read {path}: {error}.") from error


def refuse_oversized_json(data: bytes, path: Path) -> None:
    """Every value in JSON but the first follows one of these, so counting them bounds the work before it is done."""
    n_values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if len(data) > LARGEST_JSON or n_values > MOST_VALUES:
        raise CheckpointError(
            f"{path} has {len(data):,} bytes and about {n_values:,} values; a bundle has at most {LARGEST_JSON:,} and "
            f"{MOST_VALUES:,}. Keep long lists of numbers in arrays: those are stored as tensors."
        )


def refuse_oversized_header(data: bytes, path: Path) -> None:
    """Count the tensors that a file names before they are made, one by one."""
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    header = data[8 : 8 + min(size, LARGEST_HEADER)]
    n_tensors = header.count(b"data_offsets")
    if size > LARGEST_HEADER or n_tensors > MOST_TENSORS:
        raise CheckpointError(
            f"{path} has a header of {size:,} bytes that names {n_tensors:,} tensors or more; a bundle has at most "
            f"{LARGEST_HEADER:,} bytes and {MOST_TENSORS:,} tensors."
        )


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    refuse_oversized_json(data, path)
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds a {type(parsed).__name__}, expected an object.")
    return parsed


def write_file(path: Path, data: bytes) -> None:
    """Replace a file whole and durably, or leave it as it was."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    with named_failure(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(fresh, data)
            os.rename(fresh, path)
            sync_directory(path.parent)
        finally:
            fresh.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
