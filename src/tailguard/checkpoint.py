"""Bundles: an agent on disk as tensors in safetensors and everything else in JSON. Nothing is ever unpickled.

A bundle is a directory of `state.safetensors`, `tree.json`, `manifest.json` and `manifest.sha256`. It is written beside
its place, synced, and moved there whole; the manifest names size and sha256 of every file, so damage is found on load.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as render_tensors

from tailguard.errors import CheckpointError

FORMAT = "tailguard-bundle"
SCHEMA_VERSION = 1
TENSORS, TREE, MANIFEST, DIGEST = "state.safetensors", "tree.json", "manifest.json", "manifest.sha256"
LARGEST_JSON = 64 * 2**20


def write_bundle(directory: str | Path, tree: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write one bundle atomically; an earlier one of the same name is replaced only when the new one is complete."""
    place = Path(directory)
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
    files[DIGEST] = digest(files[MANIFEST]).encode()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        try:
            for name, data in files.items():
                write_synced(fresh / name, data)
            sync_directory(fresh)
            put_in_place(fresh, place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"Cannot write the bundle {place}: {error}. Earlier bundles are untouched.") from error
    return place


def put_in_place(fresh: Path, place: Path) -> None:
    """Move a complete bundle to its name; what stood there steps aside first and is removed last."""
    os.chmod(fresh, 0o755)  # noqa: S103 (mkdtemp makes it private; a bundle is as readable as its folder)
    aside = None
    if place.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{place.name}-old-", dir=place.parent)) / "bundle"
        os.rename(place, aside)
    os.rename(fresh, place)
    sync_directory(place.parent)
    if aside is not None:
        shutil.rmtree(aside.parent, ignore_errors=True)


def read_bundle(directory: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree and the manifest of a bundle, after every checksum has been compared."""
    place = Path(directory)
    if not place.is_dir():
        raise CheckpointError(f"There is no bundle at {place}: it must be a directory written by save().")
    manifest_bytes = read_limited(place / MANIFEST, LARGEST_JSON)
    if digest(manifest_bytes) != read_limited(place / DIGEST, 1024).decode(errors="replace").strip():
        raise CheckpointError(f"{place / MANIFEST} is damaged: its sha256 differs from {DIGEST}.")
    manifest = parse_json(manifest_bytes, place / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{place} is not a bundle of this package: format is {manifest.get('format')!r}.")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{place} has schema version {manifest.get('schema_version')!r}, this package reads {SCHEMA_VERSION}."
        )
    files = {name: read_checked(place / name, manifest) for name in (TREE, TENSORS)}
    try:
        tensors = parse_tensors(files[TENSORS])
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{place / TENSORS} cannot be parsed: {error}.") from None
    return decode(parse_json(files[TREE], place / TREE), tensors), manifest


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
    data = read_limited(path, size)
    if len(data) != size or digest(data) != checksum:
        raise CheckpointError(f"{path} is damaged: {len(data)} bytes with another sha256 than the manifest's.")
    return data


def read_limited(path: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes."""
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing or not a regular file: the bundle is incomplete.")
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than the {limit} expected.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(fresh, data)
            os.rename(fresh, path)
            sync_directory(path.parent)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"Cannot write {path}: {error}. What was there is untouched.") from error


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
