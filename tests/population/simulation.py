"""A population on a simulated cluster: segments fail, hang, come late, come twice and score NaN, on a virtual clock."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from itertools import count
from math import isfinite, nan
from typing import Any

import numpy as np

from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler
from tailguard.population.scheduler import Command, Event, Failure, ReadyCheck, Report, RunSegment, StopSegment

SPACE = (
    HyperparamConfig(name="learning_rate", low=1e-5, high=1e-2, log=True),
    HyperparamConfig(name="n_epochs", low=1, high=8, integer=True),
    HyperparamConfig(name="critic.aggregation", values=("mean", "min")),
)
HANG_TIMEOUT_S = 50.0


@dataclass
class Faults:
    """How unreliable the simulated cluster is."""

    fails: float
    hangs: float
    late: float
    not_finite: float
    twice: float

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Faults:
        return cls(*(float(rng.uniform(0.0, most)) for most in (0.9, 0.3, 0.5, 0.5, 0.5)))


@dataclass
class Cluster:
    """Runs a scheduler to its end and checks after every step what must always hold."""

    scheduler: PBTScheduler
    faults: Faults
    rng: np.random.Generator
    now: float = 0.0
    last_news: float = 0.0
    queue: list[tuple[float, int, Event]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)
    journal: list[Event] = field(default_factory=list)
    bundles: dict[str, float] = field(default_factory=dict)  # what exists, with its score
    scores: dict[int, float] = field(default_factory=dict)  # the last that each member reported
    under_way: dict[int, RunSegment] = field(default_factory=dict)
    n_exploits: int = 0

    def run(self) -> None:
        self.obey(self.scheduler.start())
        limit = 200 * self.scheduler.n_rounds * len(self.scheduler.members) + 1000
        while not self.scheduler.finished:
            assert len(self.journal) < limit, "the population does not come to an end"
            self.feed(self.next_event())
        self.check_end()

    def next_event(self) -> Event:
        config = self.scheduler.config
        check_at = self.last_news + config.ready_timeout_s / config.ready_check_max_wait
        if self.scheduler.waiting and (not self.queue or check_at < self.queue[0][0]):
            self.now = self.last_news = check_at
            return ReadyCheck()
        assert self.queue, "deadlock: nothing is under way and nobody is waited for"
        self.now, _, event = heapq.heappop(self.queue)
        return event

    def feed(self, event: Event) -> None:
        before = {member.index: member for member in self.scheduler.members}
        expected = not isinstance(event, ReadyCheck) and before[event.member].running == event.round
        if isinstance(event, Report) and expected:
            assert event.bundle is not None
            self.bundles[event.bundle] = self.scores[event.member] = event.score
            self.last_news = self.now
            del self.under_way[event.member]
        elif isinstance(event, Failure) and expected and event.attempt == before[event.member].failures:
            self.last_news = self.now
            del self.under_way[event.member]
        self.journal.append(event)
        self.obey(self.scheduler.handle(event))
        needed = self.scheduler.reachable()
        self.bundles = {name: score for name, score in self.bundles.items() if name in needed}

    def obey(self, commands: list[Command]) -> None:
        started = [command for command in commands if isinstance(command, RunSegment)]
        sources = {command.source for command in started if command.source is not None}
        copies = {command.member for command in started if command.source is not None}
        if self.scheduler.config.selection == "truncation" and self.scheduler.config.mode == "rounds":
            assert not sources & copies
        for command in commands:
            if isinstance(command, StopSegment):
                del self.under_way[command.member]
            else:
                self.check_segment(command)
                self.start(command)

    def check_segment(self, command: RunSegment) -> None:
        assert command.member not in self.under_way, "one member runs twice"
        member = self.scheduler.members[command.member]
        assert member.alive
        assert member.failures <= self.scheduler.config.max_failures
        assert 0 <= command.round < self.scheduler.n_rounds
        assert all(parameter.holds(command.hyperparameters[parameter.name]) for parameter in SPACE)
        assert (command.bundle is None) == (member.segments == 0)
        if command.bundle is not None:
            assert command.bundle in self.bundles, "a bundle that is still needed was deleted"
        if command.source is not None and command.attempt == 0:
            assert command.bundle is not None
            assert isfinite(self.bundles[command.bundle])
            assert command.source != command.member
            assert command.bundle.startswith(f"{command.source}/")
            self.n_exploits += 1
            own = self.scores[command.member]
            assert not isfinite(own) or self.bundles[command.bundle] > own

    def start(self, command: RunSegment) -> None:
        self.under_way[command.member] = command
        luck, takes = self.rng.random(), float(self.rng.uniform(1.0, 3.0))
        if self.rng.random() < self.faults.late:
            takes *= float(self.rng.uniform(1.0, 40.0))
        event: Event
        if luck < self.faults.fails:
            event = Failure(command.member, command.round, command.attempt)
        elif luck < self.faults.fails + self.faults.hangs:
            event, takes = Failure(command.member, command.round, command.attempt), HANG_TIMEOUT_S
        else:
            score = nan if self.rng.random() < self.faults.not_finite else float(self.rng.normal())
            event = Report(command.member, command.round, score, f"{command.member}/{command.round}")
        self.send(takes, event)
        while self.rng.random() < self.faults.twice:
            takes += float(self.rng.exponential(5.0))
            self.send(takes, event)

    def send(self, after: float, event: Event) -> None:
        heapq.heappush(self.queue, (self.now + after, next(self.order), event))

    def check_end(self) -> None:
        assert not self.under_way
        assert {member.state for member in self.scheduler.members} <= {"done", "dead"}
        twin = PBTScheduler(self.scheduler.config, self.scheduler.n_rounds, self.scheduler.seed)
        twin.start()
        half = len(self.journal) // 2
        twin.replay(self.journal[:half])
        resumed = PBTScheduler(self.scheduler.config, self.scheduler.n_rounds, self.scheduler.seed)
        resumed.load_state_dict(json.loads(json.dumps(twin.state_dict())))
        assert resumed.under_way() == twin.under_way()
        resumed.replay(self.journal[half:])
        assert repr(resumed.state_dict()) == repr(self.scheduler.state_dict())


def simulate(seed: int) -> Cluster:
    """One random population on one random cluster."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, Any] = {
        "population_size": int(rng.integers(1, 13)),
        "hyperparams": SPACE,
        "mode": ("rounds", "asynchronous")[int(rng.random() < 0.3)],
        "selection": ("truncation", "tournament")[int(rng.integers(2))],
        "truncation_ratio": float(rng.uniform(0.01, 0.5)),
        "max_score_age": int(rng.integers(3)),
        "ready_percentage": float(rng.uniform(0.1, 1.0)) if rng.random() < 0.5 else 1.0,
        "min_ready_members": int(rng.integers(1, 6)),
        "ready_check_max_wait": int(rng.integers(1, 11)),
        "ready_timeout_s": float(rng.uniform(1.0, 60.0)),
        "max_failures": int(rng.integers(0, 6)),
        "hang_timeout_s": HANG_TIMEOUT_S,
    }
    unread = {"tournament": "truncation_ratio", "asynchronous": "ready_percentage"}
    for choice in (drawn["selection"], drawn["mode"]):
        drawn.pop(unread.get(choice, ""), None)
    config = PBTConfig(**drawn)
    scheduler = PBTScheduler(config, n_rounds=int(rng.integers(1, 9)), seed=seed)
    cluster = Cluster(scheduler, Faults.drawn(rng), rng)
    cluster.run()
    return cluster
