"""Errors a user can act on: each message says what, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple


class TailguardError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TailguardError, ValueError):
    """A configuration that cannot be meant."""


class InertSetting(NamedTuple):
    """A setting that was given but does not act as it reads."""

    path: str
    value: Any
    why: str
    """What follows `path=value`: why it does not act, and what to do."""
    instead: Any
    """What it counts as: what an earlier version, which accepted it, did with it."""
    conditional: bool = True
    """Nothing reads it beside the other settings; otherwise it would have to be changed before it is read."""

    def __str__(self) -> str:
        return f"{self.path}={self.value!r} {self.why}"

    def below(self, prefix: str) -> InertSetting:
        """The setting with its path as seen from the configuration that holds this one as `prefix`."""
        return self._replace(path=f"{prefix}.{self.path}") if prefix else self


class InertSettingError(ConfigError):
    """Settings that would be accepted and do nothing, or would silently be taken as something else."""

    def __init__(self, settings: Sequence[InertSetting]) -> None:
        super().__init__("\n".join(map(str, settings)))
        self.settings = tuple(settings)


class EnvContractError(TailguardError, ValueError):
    """An environment that breaks its contract: wrong space, wrong shape, non-finite numbers."""


class StateError(TailguardError, ValueError):
    """Saved state that does not fit the object it is loaded into."""


class CheckpointError(TailguardError, ValueError):
    """A bundle that is missing, damaged or of another format; names the file and what is wrong with it."""


class DamagedCheckpointError(CheckpointError):
    """A bundle whose bytes are not the ones that were written: a file is missing, or its checksum differs."""


class RunError(TailguardError, RuntimeError):
    """A run folder that cannot be used now: another process writes it, or it cannot be written."""


class EnvStepError(TailguardError, RuntimeError):
    """An environment raised an error in step or reset; names the environment, and that error is the cause."""


class EnvWorkerError(TailguardError, RuntimeError):
    """A worker process of an environment died or no longer answers; names the environment."""


class DataError(TailguardError, ValueError):
    """Market data that cannot be trusted; names row, value and fix."""


class NonFiniteError(TailguardError, FloatingPointError):
    """NaN or infinity where a finite number must be; names env, step and quantity."""


class TrainingDivergedError(TailguardError, RuntimeError):
    """Too many optimizer steps in a row had to be skipped."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean "gamma"?' or an empty string."""
    match = get_close_matches(name, list(known), n=1)
    return f' Did you mean "{match[0]}"?' if match else ""
