"""Work that an executor can do anywhere: a task is a name and a mapping of plain values, and so is its result.

Tasks are pure functions of files on a path that all machines share: doing one twice is harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tailguard.errors import ConfigError

MAX_FAILURES, HANG_TIMEOUT_S, START_TIMEOUT_S = 3, 600.0, 3600.0
"""Of independent tasks: failures after which one is given up, silence after which one is ended, and time in which none
could begin after which the work is broken off."""
Beat = Callable[[], None]
"""A sign of life: called at least once per update while a task is worked on."""


@dataclass(frozen=True)
class Task:
    """What to do. The key says which attempt of which work it is; nobody else uses it."""

    key: str
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a task ended: with a result, or without one and the reason."""

    key: str
    result: Mapping[str, Any] | None
    reason: str = ""


class Executor(Protocol):
    """Where tasks are worked on. Every submitted task has one outcome, unless it was cancelled."""

    @property
    def starved(self) -> bool:
        """Whether all that was submitted waits for somebody else's work to end: it is not late, it cannot begin."""
        ...

    def submit(self, task: Task) -> None: ...

    def cancel(self, key: str) -> None:
        """Nobody waits for this task any more."""
        ...

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Outcomes that have come, after at most `timeout_s`."""
        ...

    def close(self) -> None:
        """End everything that is still being worked on."""
        ...


def run_all(executor: Executor, tasks: Sequence[Task], max_failures: int, told: Callable[[Outcome], None]) -> int:
    """Work on independent tasks, each again after a failure, up to a limit; returns how many were given up.

    `told` hears of every outcome, failures included.
    """
    by_key = {task.key: task for task in tasks}
    failures = dict.fromkeys(by_key, 0)
    waiting = set(by_key)
    for task in tasks:
        executor.submit(task)
    while waiting:
        for outcome in executor.wait(1.0):
            told(outcome)
            failures[outcome.key] += outcome.result is None
            if outcome.result is None and failures[outcome.key] <= max_failures:
                executor.submit(by_key[outcome.key])
            else:
                waiting.discard(outcome.key)
    return sum(count > max_failures for count in failures.values())


class InlineExecutor:
    """In this process, one task after the other: for debugging, and where processes cost more than the work."""

    starved = False

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def cancel(self, key: str) -> None:
        self.tasks = deque(task for task in self.tasks if task.key != key)

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self.tasks:
            return []
        task = self.tasks.popleft()
        try:
            return [Outcome(task.key, perform(task.kind, task.payload, lambda: None))]
        except Exception as error:
            return [Outcome(task.key, None, f"{type(error).__name__}: {error}")]

    def close(self) -> None:
        self.tasks.clear()


def perform(kind: str, payload: Mapping[str, Any], beat: Beat) -> Mapping[str, Any]:
    """Work on a task in this process."""
    if kind == "segment":
        from tailguard.population.segment import perform_segment

        return perform_segment(payload, beat)
    if kind == "train":
        from tailguard.population.runs import perform_training

        return perform_training(payload, beat)
    if kind == "fold":
        from tailguard.population.folds import perform_fold

        return perform_fold(payload, beat)
    raise ConfigError(f"There is no kind of task called {kind!r}.")
