"""What a doctor's line is: a question, a verdict with its figure, and what to do when the answer is no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tailguard.doctor.patient import Patient

Status = Literal["pass", "fail", "n/a"]


@dataclass(frozen=True)
class Verdict:
    """The answer to one check."""

    status: Status
    figure: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """One property, examined on the patient's own environment and settings."""

    name: str
    question: str
    examine: Callable[[Patient], Verdict]


def healthy(figure: str) -> Verdict:
    return Verdict("pass", figure)


def sick(figure: str, advice: str) -> Verdict:
    return Verdict("fail", figure, advice)


def not_applicable(why: str) -> Verdict:
    return Verdict("n/a", why)


def judged(sound: bool, figure: str, advice: str) -> Verdict:
    """Pass or fail, with the same figure."""
    return healthy(figure) if sound else sick(figure, advice)
