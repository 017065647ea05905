"""A member of a population: its place, its settings, what it reached and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Literal

from tailguard.population.space import Value

MemberState = Literal["running", "ready", "done", "dead"]


@dataclass(frozen=True)
class Ancestor:
    """One exploit: from which round on a member went on as a copy of another, and with which settings."""

    round: int
    source: int
    source_bundle: str
    hyperparameters: Mapping[str, Value]


@dataclass(frozen=True)
class PopulationMember:
    """All that the scheduler knows of one member. Scores are of the round in which they were measured."""

    index: int
    hyperparameters: Mapping[str, Value]
    state: MemberState = "ready"
    running: int | None = None
    """Round of the segment under way."""
    segments: int = 0
    """Segments finished."""
    bundle: str | None = None
    """The last one written."""
    score: float | None = None
    score_round: int | None = None
    failures: int = 0
    """Failed attempts at the segment under way."""
    lineage: tuple[Ancestor, ...] = field(default=())

    @property
    def parent(self) -> int | None:
        """The member it was last copied from."""
        return self.lineage[-1].source if self.lineage else None

    @property
    def alive(self) -> bool:
        return self.state != "dead"

    def has_score(self, not_before: int) -> bool:
        """Whether it has a finite score that is not stale; only such a member can be a source."""
        return (
            self.bundle is not None
            and self.score is not None
            and isfinite(self.score)
            and self.score_round is not None
            and self.score_round >= not_before
        )

    @property
    def rank_key(self) -> tuple[bool, float, int]:
        """Best last: a score that is not finite is the worst of all; ties go by index, so ranking is a function."""
        finite = self.score is not None and isfinite(self.score)
        return finite, self.score if finite and self.score is not None else 0.0, -self.index

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PopulationMember:
        """What `state_dict` gave, also after it went through JSON."""
        lineage = tuple(Ancestor(**ancestor) for ancestor in state["lineage"])
        return cls(**{**state, "lineage": lineage})
