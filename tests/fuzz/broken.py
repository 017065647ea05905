"""Surfaces with a fault each, for tests of the runner."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.fuzz.runner import Outcome, Surface, WrongLoad


def fine(rng: random.Random, place: Path) -> Outcome:
    return Outcome("loaded", f"{rng.random()}")


def raises(rng: random.Random, place: Path) -> Outcome:
    raise KeyError("score")


def crashes(rng: random.Random, place: Path) -> Outcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Outcome("loaded")


def hangs(rng: random.Random, place: Path) -> Outcome:
    time.sleep(600)
    return Outcome("loaded")


def errs(rng: random.Random, place: Path) -> Outcome:
    raise WrongLoad("two is three")


SURFACES = (
    Surface("fine", fine),
    Surface("raises", raises),
    Surface("crashes", crashes),
    Surface("hangs", hangs),
    Surface("errs", errs),
)
