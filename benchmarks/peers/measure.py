"""One measurement in a process of its own: `python -m benchmarks.peers.measure '<request>'` prints what it found."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.peers.cases import N_EPOCHS, Case, Work, make_env
from benchmarks.peers.learners import LEARNERS, OWN

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # the second counts every thread of the process
STAGES = ("environment", "acting", "evaluating", "gradients", "optimizer")


@dataclass(frozen=True)
class Request:
    """What to measure."""

    who: str
    case: Case
    threads: int
    seconds: float

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Request:
        fields = json.loads(text)
        return cls(**{**fields, "case": Case(**fields["case"])})


class Clock:
    """Seconds spent inside wrapped functions, by both clocks."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self.calls: dict[str, int] = {}

    def restart(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        began = {kind: now() for kind, now in CLOCKS.items()}
        try:
            yield
        finally:
            spent = self.seconds.setdefault(name, dict.fromkeys(CLOCKS, 0.0))
            self.calls[name] = self.calls.get(name, 0) + 1
            for kind, now in CLOCKS.items():
                spent[kind] += now() - began[kind]

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute`; the library itself carries no timing code."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)

    def of(self, name: str, kind: str) -> float:
        return self.seconds.get(name, {}).get(kind, 0.0)


def watch_ours(model: Any, clock: Clock) -> None:
    """Split our time by stage; called once per process, because some of the functions belong to modules."""
    from tailguard.ppo import algorithm, update

    clock.wrap(model.env, "step", "environment")
    clock.wrap(algorithm, "evaluate_rollout", "evaluating")
    clock.wrap(update, "batch_gradient", "gradients")
    clock.wrap(update, "take_step", "optimizer")


def shares(clock: Clock) -> dict[str, float]:
    """Share of the CPU time per stage; empty where it was not split."""
    if "gradients" not in clock.seconds:
        return {}
    spent = {stage: clock.of(stage, "cpu") for stage in STAGES}
    spent["acting"] = clock.of("rollout", "cpu") - spent["environment"] - spent["evaluating"]
    return {stage: spent[stage] / clock.of("total", "cpu") for stage in STAGES}


def measure(request: Request) -> dict[str, float]:
    """Steps per second, by both clocks, of whole rollout-and-update cycles that last at least `seconds`."""
    learner, case = LEARNERS[request.who], request.case
    work = Work(N_EPOCHS, case.rollout) if request.who in OWN else case.peer_work()
    if learner.warm_up:  # imports, kernels, allocator
        small = replace(case, n_envs=min(8, case.n_envs), n_steps=min(128, case.n_steps))
        learner.make(small, make_env(small), small.peer_work(), request.threads).learn(learner.warm_up * small.rollout)
    clock, model = Clock(), learner.make(case, make_env(case), work, request.threads)
    clock.wrap(model, "collect_rollouts", "rollout")
    clock.wrap(model, "train", "update")
    if request.who in OWN and request.threads == 1:  # stages of two threads overlap
        watch_ours(model, clock)
    cycles = run_cycles(model, clock, case, request.seconds)

    def steps_per_second(kind: str) -> float:
        uncounted = case.uncounted(work) * clock.of("update", kind)
        return cycles * case.rollout / (clock.of("total", kind) + uncounted)

    speeds = {kind: steps_per_second(kind) for kind in CLOCKS}
    return {**speeds, "rollout": cycles * case.rollout / clock.of("rollout", "wall"), **shares(clock)}


def run_cycles(model: Any, clock: Clock, case: Case, seconds: float) -> int:
    """Run as many cycles as the case and the time ask for; their number.

    Short rollouts begin after one that is not counted. RecurrentPPO is several times slower on a rollout in which an
    episode starts, and the very first one always has such starts: alone it would be no fair sample.
    """
    if case.least_cycles > 1:
        model.learn(case.rollout)
        clock.restart()
    with clock.running("total"):
        model.learn(case.least_cycles * case.rollout, reset_num_timesteps=False)
    more = round(seconds / clock.of("total", "wall") - 1.0)
    if more <= 0:
        return case.least_cycles
    with clock.running("total"):
        model.learn(more * case.least_cycles * case.rollout, reset_num_timesteps=False)
    return (1 + more) * case.least_cycles


if __name__ == "__main__":
    print(json.dumps(measure(Request.parse(sys.argv[1]))))
