"""All measurements of a comparison, interleaved, within a budget of time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import product
from statistics import median

from benchmarks.peers.apart import measure_apart
from benchmarks.peers.cases import Case
from benchmarks.peers.measure import Request


@dataclass(frozen=True)
class Plan:
    """What to compare: every round visits every case, and in it every learner."""

    cases: tuple[Case, ...]
    threads: dict[str, tuple[int, ...]]  # per learner; of several, a case is given the fastest
    rounds: int
    seconds: float
    minutes: float

    def requests(self) -> list[Request]:
        """One round."""
        return [
            Request(who, case, threads, self.seconds)
            for case in self.cases
            for who, counts in self.threads.items()
            for threads in counts
        ]


@dataclass
class Measured:
    """What was found, one entry per round."""

    found: dict[Request, list[dict[str, float]]] = field(default_factory=dict)

    def add(self, request: Request, result: dict[str, float]) -> None:
        self.found.setdefault(request, []).append(result)

    def middle(self, request: Request, key: str) -> float:
        return median(result[key] for result in self.found[request])

    def best(self, who: str, case: Case, key: str) -> float:
        """Median of the thread setting that is fastest for this learner and case."""
        return max(self.middle(r, key) for r in self.found if (r.who, r.case) == (who, case))

    def ratio(self, who: str, case: Case, peer: str, key: str) -> float:
        return self.best(who, case, key) / self.best(peer, case, key)

    def rounds(self) -> tuple[int, int]:
        """Fewest and most measurements behind a figure."""
        counts = [len(results) for results in self.found.values()]
        return min(counts), max(counts)


def compare(plan: Plan) -> Measured:
    """The first round is whole; after it, a measurement is left out where it would overrun the budget."""
    measured, took = Measured(), dict.fromkeys(plan.requests(), 0.0)
    began = time.perf_counter()
    for _, request in product(range(plan.rounds), plan.requests()):
        now = time.perf_counter()
        if took[request] and now + took[request] > began + 60.0 * plan.minutes:
            continue
        result = measure_apart(request)
        took[request] = time.perf_counter() - now
        measured.add(request, result)
        print(line(request, result, time.perf_counter() - began), flush=True)
    return measured


def line(request: Request, result: dict[str, float], elapsed: float) -> str:
    case = request.case
    return (
        f"{elapsed:5.0f} s  {case.env:8s} hidden {case.hidden:3d}  envs {case.n_envs:2d}  n_steps {case.n_steps:4d}  "
        f"{request.who:14s} {request.threads} thread(s)  {result['wall']:8,.0f}/s  {result['cpu']:8,.0f}/CPU s"
    )
