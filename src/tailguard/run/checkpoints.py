"""The checkpoints of a run: which are kept, and from which one training goes on."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from tailguard.checkpoint import named_failure, read_bundle, read_manifest, recover, remove_bundle
from tailguard.errors import CheckpointError, DamagedCheckpointError, TailguardError
from tailguard.ppo import DistributionalPPO
from tailguard.run.folder import RunFolder

ASIDE = re.compile(r"\.(step-[0-9]{1,18})\.previous")
DAMAGED = re.compile(r"damaged-(step-([0-9]{1,18}))(-[0-9]+)?")
"""What is set aside; the last number tells several of one step apart."""


@dataclass(frozen=True)
class Mark:
    """What decides whether a checkpoint is kept."""

    step: int
    score: float | None
    """Mean return of recent episodes when it was written; None when there was none, or when it is damaged."""
    exact: bool
    """Whether training can go on from it as if it had not stopped."""


def marks(folder: RunFolder) -> list[Mark]:
    """The checkpoints on disk, ascending."""
    return [mark(folder, step) for step in folder.steps()]


def mark(folder: RunFolder, step: int) -> Mark:
    try:
        manifest = read_manifest(folder.checkpoint(step))
    except CheckpointError:
        return Mark(step, None, False)
    score = manifest.get("score")
    return Mark(step, float(score) if isinstance(score, int | float) else None, manifest.get("exact") is True)


def best_of(marks: Sequence[Mark]) -> Mark | None:
    """The highest score, the later of equals."""
    scored = [mark for mark in marks if mark.score is not None]
    return max(scored, key=lambda mark: (mark.score, mark.step)) if scored else None


def kept(marks: Sequence[Mark], keep_last: int) -> set[int]:
    """Steps that stay: the last k, the best, and the last one that training can go on from."""
    ordered = sorted(marks, key=lambda mark: mark.step)
    best = best_of(ordered)
    exact = [mark.step for mark in ordered if mark.exact]
    return {*(mark.step for mark in ordered[-keep_last:]), *exact[-1:], *([best.step] if best else [])}


def prune(folder: RunFolder, keep_last: int) -> None:
    """Remove what need not stay."""
    present = marks(folder)
    for step in {mark.step for mark in present} - kept(present, keep_last):
        remove_bundle(folder.checkpoint(step))


def tidy(folder: RunFolder) -> None:
    """Finish what a kill interrupted: half-replaced bundles return, half-written ones go. Under the lock only."""
    if not folder.checkpoints.is_dir():
        return
    with named_failure(folder.checkpoints, 0):
        for entry in sorted(folder.checkpoints.iterdir()):
            aside = ASIDE.fullmatch(entry.name)
            if aside is not None:
                recover(folder.checkpoints / aside.group(1))
            if entry.name.startswith(".step-"):
                shutil.rmtree(entry, ignore_errors=True)


SettingsFor = Callable[[Path], Mapping[str, Any]]
"""From a checkpoint to settings of its agent that have changed since; raises where they cannot change."""


def unchanged(checkpoint: Path) -> Mapping[str, Any]:
    """Resume an agent as it was."""
    return {}


def newest_good(
    folder: RunFolder, make_env: Callable[[], VecEnv], exact: bool, settings_for: SettingsFor = unchanged
) -> DistributionalPPO | None:
    """The agent of the newest checkpoint that is whole, damaged ones named and set aside; None without any.

    `exact` passes over checkpoints that do not say where their episodes stood. One that is whole and is refused all the
    same, because it is of another version or was made for something else, is named and stays where it is.
    """
    take_back(folder)
    damaged = []
    for step in reversed(folder.steps()):
        place = folder.checkpoint(step)
        try:
            if exact and read_manifest(place).get("exact") is not True:
                continue
            settings = settings_for(place)
            return DistributionalPPO.resume(place, make_env(), **settings)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            aside = set_aside(place)
            warnings.warn(f"{error} It is set aside as {aside.name}; the one before it is used.", stacklevel=2)
    if damaged or damaged_ones(folder):
        reason = damaged[0] if damaged else f"What it had is set aside as {damaged_ones(folder)[-1][0].name}."
        raise CheckpointError(
            f"No checkpoint of {folder.path} can be read. {reason} Start again with `tailguard train "
            f"{folder.config_file} --run NAME`, or put a copy of a checkpoint into {folder.checkpoints}."
        )
    return None


def set_aside(place: Path) -> Path:
    """Rename a damaged checkpoint; what was set aside before stays."""
    names = (f"damaged-{place.name}{ending}" for ending in ("", *(f"-{number}" for number in range(2, 1000))))
    aside = next(free for name in names if not (free := place.with_name(name)).exists())
    with named_failure(place, 0):
        place.rename(aside)
    return aside


def damaged_ones(folder: RunFolder) -> list[tuple[Path, int]]:
    """What was set aside, and of which step, ascending."""
    if not folder.checkpoints.is_dir():
        return []
    found = [(entry, DAMAGED.fullmatch(entry.name)) for entry in sorted(folder.checkpoints.iterdir())]
    return sorted(((entry, int(match.group(2))) for entry, match in found if match), key=lambda pair: pair[1])


def take_back(folder: RunFolder) -> None:
    """Earlier versions set some checkpoints aside that were whole: they return to their names, with a line each."""
    for aside, step in damaged_ones(folder):
        place = folder.checkpoint(step)
        if place.exists() or not is_whole(aside):
            continue
        try:
            aside.rename(place)
        except OSError as error:
            warnings.warn(f"{aside} is whole, but cannot be renamed to {place.name}: {error.strerror}.", stacklevel=2)
            continue
        warnings.warn(f"{aside} is whole after all; it is {place.name} again.", stacklevel=2)


def is_whole(place: Path) -> bool:
    """Whether every checksum holds and an agent can be made of it."""
    try:
        read_bundle(place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the agent would be, not whether it is there
            DistributionalPPO.load(place)
    except TailguardError:
        return False
    return True


def newest_checkpoint(folder: RunFolder) -> Path:
    """The newest bundle of a run, for those who only read it."""
    take_back(folder)
    return folder.last_checkpoint()
