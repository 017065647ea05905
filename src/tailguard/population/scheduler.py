"""Population-based training as pure logic: events in, commands out. No clock, no files, no global random numbers.

Every random draw is keyed by (seed, purpose, round, member), so the order in which members report changes nothing, and
the same events always give the same commands: restarting a population is replaying its journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from tailguard.configuration import (
    Config,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Several,
)
from tailguard.errors import ConfigError, InertSetting
from tailguard.population.member import Ancestor, PopulationMember
from tailguard.population.space import HyperparamConfig, Value, explore_all, sample_all
from tailguard.stateful import require_keys

SEGMENT, SAMPLE, SELECT, EXPLORE = range(4)  # purposes of random draws
Purpose = int


class PBTConfig(Config):
    """How a population is judged and who learns from whom (docs/population.md)."""

    population_size: Several = 4
    """Members that train side by side."""
    hyperparams: tuple[HyperparamConfig, ...]
    """The settings that members vary."""
    perturbation_interval: PositiveInt = 10
    """Updates between two judgements: the length of a segment."""
    score: Literal["validation", "training"] = "validation"
    """What members are judged by: the mean return per episode of the deterministic policy where nobody trains, or of
    the exploring one while it trained."""
    score_steps: PositiveInt = 250
    """Steps per environment of a validation; 250 is one episode of the embedded markets."""
    mode: Literal["rounds", "asynchronous"] = "rounds"
    """Judge everyone together after each round, or each member when it comes: faster on machines of uneven speed, but
    the outcome then depends on who comes first."""
    selection: Literal["truncation", "tournament"] = "truncation"
    """The worst copy one of the best, or each meets one other at random and copies it when it is better."""
    truncation_ratio: Annotated[float, Field(gt=0.0, le=0.5)] = 0.25
    """Share of the members that counts as best and as worst; at least one each."""
    min_score_gap: NonNegativeFloat = 0.0
    """A source must be better by more than this, in units of the score."""
    max_score_age: NonNegativeInt = 1
    """Rounds after which the score of a member that is late no longer counts."""
    optimizer_exploit_strategy: Literal["copy", "reset"] = "copy"
    """Whether a copy takes over the optimizer's memory or starts with a fresh optimizer of the same kind."""
    ready_percentage: Fraction = 1.0
    """Share of the living members that must report before a round is judged; below 1 timing decides who counts."""
    min_ready_members: PositiveInt = 2
    """With so many members the population goes on when the others do not come in time."""
    ready_check_max_wait: PositiveInt = 10
    """Failed readiness checks in a row after which the others are not waited for."""
    ready_timeout_s: PositiveFloat = 1800.0
    """Time over which those checks are spread, from the last report on: more than a segment takes."""
    max_failures: NonNegativeInt = 3
    """Failed attempts at one segment after which a member is given up."""
    hang_timeout_s: PositiveFloat = 600.0
    """A segment without a sign of life for so long is ended and done again; it gives two per update."""
    start_timeout_s: PositiveFloat = 3600.0
    """On a Ray cluster: when no segment could begin for so long, for want of free resources, the command ends; resume
    goes on."""

    def inert(self) -> Iterable[InertSetting]:
        if self.selection == "tournament":
            yield from self.unread(("truncation_ratio",), 'a tournament is between two; use selection="truncation"')
        if self.score == "training":
            yield from self.unread(("score_steps",), 'nothing is validated; use score="validation"')
        if self.mode == "asynchronous":
            yield from self.unread(("ready_percentage",), 'nobody waits for the others; use mode="rounds"')

    @model_validator(mode="after")
    def a_population_varies_something(self) -> Self:
        if not self.hyperparams:
            raise ConfigError("The population varies nothing. Name at least one setting in hyperparams.")
        return self


@dataclass(frozen=True)
class Report:
    """A segment is finished: its score, and the bundle that the member now is."""

    member: int
    round: int
    score: float
    bundle: str | None
    figures: Mapping[str, float] = field(default_factory=dict)
    """What its updates say of its health; nothing is decided by them."""
    alerts: Mapping[str, float] = field(default_factory=dict)
    """Alerts that began in it, and the figure each is about."""


@dataclass(frozen=True)
class Failure:
    """An attempt at a segment ended without a bundle."""

    member: int
    round: int
    attempt: int
    reason: str = ""


@dataclass(frozen=True)
class ReadyCheck:
    """A part of the patience with late members is used up; sent only while `waiting`."""


@dataclass(frozen=True)
class RunSegment:
    """Train a member for one segment, from `bundle` or from nothing; `source` says whose it is, if not its own."""

    member: int
    round: int
    attempt: int
    bundle: str | None
    source: int | None
    hyperparameters: Mapping[str, Value]
    seed: int
    updates: int


@dataclass(frozen=True)
class StopSegment:
    """The population no longer waits for this segment."""

    member: int
    round: int


Event = Report | Failure | ReadyCheck
Command = RunSegment | StopSegment


class PBTScheduler:
    """Ranks members, lets the worst go on as copies of the best with other settings, and never waits for ever."""

    def __init__(
        self,
        config: PBTConfig,
        n_rounds: int,
        seed: int = 0,
        initial: Sequence[Mapping[str, Value]] | None = None,
    ) -> None:
        if initial is not None and len(initial) != config.population_size:
            raise ConfigError(f"{len(initial)} initial settings for a population of {config.population_size}.")
        self.config, self.n_rounds, self.seed = config, n_rounds, seed
        chosen = initial or [self.sampled(index) for index in range(config.population_size)]
        self.members = [PopulationMember(index, dict(values)) for index, values in enumerate(chosen)]
        self.round = 0  # of the last judgement; meaningless in asynchronous mode
        self.failed_ready_checks = 0
        self.failed_in_a_row = 0
        self.finished = False

    # events in, commands out

    def start(self) -> list[Command]:
        """Everybody begins."""
        return [self.run(member, 0) for member in self.members]

    def handle(self, event: Event) -> list[Command]:
        """What follows from an event. One that is not expected (a duplicate, a straggler given up) changes nothing."""
        if self.finished:
            return []
        if isinstance(event, ReadyCheck):
            return self.on_check()
        member = self.members[event.member]
        if member.running != event.round:
            return []
        if isinstance(event, Report):
            return self.on_report(member, event)
        return self.on_failure(member, event)

    def replay(self, events: Iterable[Event]) -> list[Command]:
        """The state after a journal's events; returns the segments that are under way."""
        for event in events:
            self.handle(event)
        return self.under_way()

    def under_way(self) -> list[Command]:
        """Every segment that has been asked for and not come back."""
        return [self.segment(member) for member in self.members if member.running is not None and not self.finished]

    def on_report(self, member: PopulationMember, event: Report) -> list[Command]:
        self.failed_in_a_row = 0
        member = self.put(
            replace(
                member,
                state="ready",
                running=None,
                segments=member.segments + 1,
                bundle=event.bundle if event.bundle is not None else member.bundle,
                score=float(event.score),
                score_round=event.round,
                failures=0,
            )
        )
        if self.config.mode == "asynchronous":
            return self.judge_alone(member, event.round)
        if event.round < self.round:  # late: it joins the round the others are in
            return [self.run(member, self.round)]
        return self.judge_when_ready()

    def on_failure(self, member: PopulationMember, event: Failure) -> list[Command]:
        if event.attempt != member.failures:
            return []
        self.failed_in_a_row = 0
        if member.failures < self.config.max_failures:
            member = self.put(replace(member, failures=member.failures + 1))
            return [self.segment(member)]
        self.put(replace(member, state="dead", running=None, failures=member.failures + 1))
        return self.judge_when_ready()

    def on_check(self) -> list[Command]:
        if not self.waiting:
            return []
        self.failed_ready_checks += 1
        self.failed_in_a_row += 1
        return self.judge() if self.failed_in_a_row >= self.config.ready_check_max_wait else []

    # who is ready

    @property
    def alive(self) -> list[PopulationMember]:
        return [member for member in self.members if member.alive]

    @property
    def ready(self) -> list[PopulationMember]:
        """Living members that wait to be judged or have nothing left to do."""
        return [member for member in self.members if member.state in ("ready", "done")]

    @property
    def waiting(self) -> bool:
        """Whether enough members are ready to go on without the others, should these not come."""
        return not self.finished and len(self.ready) >= min(self.config.min_ready_members, len(self.alive))

    def judge_when_ready(self) -> list[Command]:
        """Go on as soon as the share asked for is there; when nobody is left, the population is over.

        Who has missed a judgement is not waited for again until it reports.
        """
        if not self.alive:
            return self.finish()
        in_rounds = self.config.mode == "rounds"
        expected = [m for m in self.alive if not (in_rounds and m.running is not None and m.running < self.round)]
        share = self.config.ready_percentage if in_rounds else 1.0
        needed = max(ceil(share * len(expected)), min(self.config.min_ready_members, len(self.alive)))
        return self.judge() if len(self.ready) >= needed else []

    # judgement

    def judge(self) -> list[Command]:
        """The end of a round: the worst become copies of the best, and everyone who is ready goes on."""
        self.failed_in_a_row = 0
        if self.config.mode == "asynchronous" or self.round + 1 >= self.n_rounds:
            return self.finish()
        ready = self.ready
        ranked = self.ranked(self.round - self.config.max_score_age, {member.index for member in ready})
        choices = {member.index: self.source_for(member, ranked, self.round) for member in ready}
        self.round += 1
        return [self.go_on(member, choices[member.index], self.round) for member in ready]

    def judge_alone(self, member: PopulationMember, finished_round: int) -> list[Command]:
        """Asynchronous: one member is compared with the latest scores of the others and goes on at once."""
        if finished_round + 1 >= self.n_rounds:
            self.put(replace(member, state="done"))
            return self.judge_when_ready()
        ranked = self.ranked(finished_round - self.config.max_score_age, {member.index})
        return [self.go_on(member, self.source_for(member, ranked, finished_round), finished_round + 1)]

    def ranked(self, not_before: int, judged: set[int]) -> list[PopulationMember]:
        """Worst first: those who are judged, and those still running whose last score is fresh enough to learn from."""
        chosen = [m for m in self.members if m.index in judged or (m.alive and m.has_score(not_before))]
        return sorted(chosen, key=lambda member: member.rank_key)

    def source_for(
        self, member: PopulationMember, ranked: list[PopulationMember], judged_round: int
    ) -> PopulationMember | None:
        """The member that this one goes on as a copy of, or None; always one that is strictly better."""
        rng = self.rng(SELECT, judged_round, member.index)
        if self.config.selection == "tournament":
            others = [other for other in ranked if other.index != member.index]
            rivals = [others[int(rng.integers(len(others)))]] if others else []
        else:
            worst, best = truncation_sets(ranked, self.config.truncation_ratio)
            rivals = best if member in worst else []
        better = [rival for rival in rivals if self.is_better(rival, member)]
        return better[int(rng.integers(len(better)))] if better else None

    def is_better(self, source: PopulationMember, member: PopulationMember) -> bool:
        """Strictly, by more than the gap asked for; what is not finite is worse than anything and never a source."""
        if source.bundle is None or source.score is None or not isfinite(source.score):
            return False
        if member.score is None or not isfinite(member.score):
            return True
        return source.score > member.score + self.config.min_score_gap

    def go_on(self, member: PopulationMember, source: PopulationMember | None, next_round: int) -> RunSegment:
        """The next segment: as a copy of the source with its settings explored, or as before."""
        if source is None or source.bundle is None:
            return self.run(member, next_round)
        explored = self.explored(source, member, next_round)
        copied = replace(
            member,
            hyperparameters=explored,
            bundle=source.bundle,
            score=None,  # the score belonged to the agent that is gone
            score_round=None,
            lineage=(*member.lineage, Ancestor(next_round, source.index, source.bundle, explored)),
        )
        return self.run(copied, next_round)

    def explored(self, source: PopulationMember, member: PopulationMember, next_round: int) -> dict[str, Value]:
        """The settings that a copy tries: the source's, each moved."""
        rng = self.rng(EXPLORE, next_round, member.index)
        return explore_all(self.config.hyperparams, source.hyperparameters, rng)

    def run(self, member: PopulationMember, next_round: int) -> RunSegment:
        return self.segment(self.put(replace(member, state="running", running=next_round, failures=0)))

    def segment(self, member: PopulationMember) -> RunSegment:
        """The segment under way, a function of the member alone: asked twice it is the same."""
        if member.running is None:
            raise ConfigError(f"Member {member.index} has no segment under way.")
        copied = bool(member.lineage) and member.lineage[-1].round == member.running
        return RunSegment(
            member=member.index,
            round=member.running,
            attempt=member.failures,
            bundle=member.bundle,
            source=member.parent if copied else None,
            hyperparameters=member.hyperparameters,
            seed=int(self.rng(SEGMENT, member.running, member.index).integers(2**31)),
            updates=self.config.perturbation_interval,
        )

    def finish(self) -> list[Command]:
        """Nothing more is asked for; who is still running is told to stop."""
        stops: list[Command] = []
        for member in self.members:
            if member.running is not None:
                stops.append(StopSegment(member.index, member.running))
            if member.alive:
                self.put(replace(member, state="done", running=None))
        self.finished = True
        return stops

    # reading

    @property
    def best(self) -> PopulationMember | None:
        """The member with the best score that is not stale; an old one only when there is no other."""
        latest = max((m.score_round for m in self.members if m.score_round is not None), default=0)
        scored = [member for member in self.members if member.has_score(0)]
        fresh = [member for member in scored if member.has_score(latest - self.config.max_score_age)]
        return max(fresh or scored, key=lambda member: member.rank_key, default=None)

    def reachable(self) -> set[str]:
        """Bundles that anything still to come may ask for; all others may be deleted."""
        return {member.bundle for member in self.members if member.bundle is not None}

    # random numbers and state

    def sampled(self, index: int) -> dict[str, Value]:
        """The settings a member begins with."""
        return sample_all(self.config.hyperparams, self.rng(SAMPLE, 0, index))

    def rng(self, purpose: Purpose, judged_round: int, index: int) -> np.random.Generator:
        """A stream of its own for every purpose, round and member."""
        return np.random.default_rng((self.seed, purpose, judged_round, index))

    def put(self, member: PopulationMember) -> PopulationMember:
        self.members[member.index] = member
        return member

    def state_dict(self) -> dict[str, Any]:
        return {
            "members": [member.state_dict() for member in self.members],
            "round": self.round,
            "failed_ready_checks": self.failed_ready_checks,
            "failed_in_a_row": self.failed_in_a_row,
            "finished": self.finished,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        self.members = [PopulationMember.from_state(member) for member in state["members"]]
        self.round = int(state["round"])
        self.failed_ready_checks = int(state["failed_ready_checks"])
        self.failed_in_a_row = int(state["failed_in_a_row"])
        self.finished = bool(state["finished"])


def truncation_sets(
    ranked: Sequence[PopulationMember], ratio: float
) -> tuple[list[PopulationMember], list[PopulationMember]]:
    """(worst, best) of members ranked worst first: never overlapping, never empty for two or more.

    Members whose score is not finite are always among the worst, however many they are.
    """
    n = len(ranked)
    size = min(max(int(ratio * n), 1), n // 2)
    broken = [member for member in ranked[size:] if not member.rank_key[0]]
    best = [member for member in ranked[n - size :] if member.rank_key[0]]
    return [*ranked[:size], *broken], best
