"""J3-J5: who copies whom, nobody waits for ever, and the same events give the same population."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from tailguard.errors import ConfigError
from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler, PopulationMember
from tailguard.population.scheduler import (
    Command,
    Failure,
    ReadyCheck,
    Report,
    RunSegment,
    StopSegment,
    truncation_sets,
)
from tests.population.quadratic import best_of_two_workers, space
from tests.population.simulation import simulate

RATE = HyperparamConfig(name="learning_rate", low=1e-5, high=1e-2, log=True)


def scheduler(size: int = 4, n_rounds: int = 3, **settings: Any) -> PBTScheduler:
    return PBTScheduler(PBTConfig(population_size=size, hyperparams=(RATE,), **settings), n_rounds, seed=1)


def reported(scores: list[float], population: PBTScheduler, judged_round: int = 0) -> list[Command]:
    """The commands that follow when everybody reports."""
    commands: list[Command] = []
    for index, score in enumerate(scores):
        commands = population.handle(Report(index, judged_round, score, f"{index}/{judged_round}"))
    return commands


@pytest.mark.parametrize("seed", range(20))
def test_two_workers_solve_the_quadratic_that_neither_solves_alone(seed: int) -> None:
    assert best_of_two_workers(seed, space(perturb_step=0.1, resample_probability=0.0)) >= 1.19


@pytest.mark.parametrize("factors", [(1.0,), (0.8, 1.25)], ids=["exploit alone", "multiplying alone"])
def test_without_additive_steps_or_resampling_the_quadratic_stays_where_one_worker_ends(factors: Any) -> None:
    for seed in range(20):
        reached = best_of_two_workers(seed, space(perturb_factors=factors, resample_probability=0.0))
        assert reached == pytest.approx(0.39, abs=1e-3)


def test_the_worst_goes_on_as_a_copy_of_the_best_with_other_settings_and_remembers_it() -> None:
    population = scheduler()
    population.start()
    before = [member.hyperparameters for member in population.members]
    commands = reported([3.0, 1.0, 4.0, 2.0], population)
    runs = {command.member: command for command in commands if isinstance(command, RunSegment)}
    assert (runs[1].source, runs[1].bundle) == (2, "2/0")
    assert runs[1].hyperparameters != before[2]
    assert population.members[1].parent == 2
    assert population.members[1].lineage[0].source_bundle == "2/0"
    for index in (0, 2, 3):
        assert (runs[index].source, runs[index].bundle) == (None, f"{index}/0")
        assert runs[index].hyperparameters == before[index]


@pytest.mark.parametrize("selection", ["truncation", "tournament"])
def test_nobody_copies_a_member_that_is_not_strictly_better(selection: str) -> None:
    population = scheduler(selection=selection)
    population.start()
    assert all(command.source is None for command in reported([1.0] * 4, population))  # type: ignore[union-attr]


def test_a_gap_that_is_asked_for_must_be_exceeded() -> None:
    for gap, copies in ((2.9, 1), (3.0, 0)):
        population = scheduler(min_score_gap=gap)
        population.start()
        commands = reported([3.0, 1.0, 4.0, 2.0], population)
        assert sum(isinstance(c, RunSegment) and c.source is not None for c in commands) == copies


def test_scores_that_are_not_finite_are_the_worst_and_never_a_source() -> None:
    population = scheduler()
    population.start()
    commands = reported([nan, float("inf"), -5.0, float("-inf")], population)
    assert [command.source for command in commands] == [2, 2, None, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("size", range(2, 30))
@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.5])
def test_best_and_worst_are_never_empty_and_never_overlap(size: int, ratio: float) -> None:
    ranked = [PopulationMember(i, {}, score=float(i), score_round=0, bundle=str(i)) for i in range(size)]
    worst, best = truncation_sets(ranked, ratio)
    assert worst
    assert best
    assert not {m.index for m in worst} & {m.index for m in best}


def test_the_order_of_reports_changes_nothing() -> None:
    states = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        population = scheduler()
        population.start()
        for index in order:
            population.handle(Report(index, 0, float(index), f"{index}/0"))
        states.append(population.state_dict())
    assert states[0] == states[1]


def test_a_duplicate_or_unexpected_report_changes_nothing() -> None:
    population = scheduler()
    population.start()
    population.handle(Report(0, 0, 1.0, "0/0"))
    before = population.state_dict()
    for event in (Report(0, 0, 9.0, "other"), Report(1, 5, 9.0, "other"), Failure(0, 0, 0), Failure(2, 0, 7)):
        assert population.handle(event) == []
    assert population.state_dict() == before


def test_a_failed_segment_is_asked_for_again_with_the_same_inputs_until_the_member_is_given_up() -> None:
    population = scheduler(max_failures=2)
    first = population.start()[1]
    assert isinstance(first, RunSegment)
    for attempt in (0, 1):
        (again,) = population.handle(Failure(1, 0, attempt))
        assert isinstance(again, RunSegment)
        assert (again.bundle, again.seed, again.hyperparameters, again.attempt) == (
            first.bundle,
            first.seed,
            first.hyperparameters,
            attempt + 1,
        )
    assert population.handle(Failure(1, 0, 2)) == []
    assert population.members[1].state == "dead"
    for index in (0, 2, 3):
        commands = population.handle(Report(index, 0, float(index), f"{index}/0"))
    assert [command.member for command in commands] == [0, 2, 3]


def test_when_all_members_are_dead_the_population_ends_without_a_best() -> None:
    population = scheduler(size=2, max_failures=0)
    population.start()
    population.handle(Failure(0, 0, 0))
    population.handle(Failure(1, 0, 0))
    assert population.finished
    assert population.best is None


def test_after_enough_failed_checks_the_population_goes_on_with_those_who_are_ready() -> None:
    population = scheduler(ready_check_max_wait=3)
    population.start()
    assert not population.waiting
    population.handle(Report(0, 0, 1.0, "0/0"))
    assert population.handle(ReadyCheck()) == []  # one is not enough, and nothing is counted
    population.handle(Report(1, 0, 2.0, "1/0"))
    assert population.waiting
    assert population.handle(ReadyCheck()) == population.handle(ReadyCheck()) == []
    commands = population.handle(ReadyCheck())
    assert [command.member for command in commands] == [0, 1]
    assert population.failed_ready_checks == 3


def test_a_late_member_joins_the_round_the_others_are_in_and_is_not_waited_for_before() -> None:
    population = scheduler(ready_check_max_wait=1, n_rounds=5)
    population.start()
    for index in (0, 1, 2):
        population.handle(Report(index, 0, float(index), f"{index}/0"))
    population.handle(ReadyCheck())
    commands = reported([1.0, 2.0, 3.0], population, judged_round=1)  # member 3 has missed a judgement
    assert [command.round for command in commands] == [2, 2, 2]
    (caught_up,) = population.handle(Report(3, 0, 9.0, "3/0"))
    assert isinstance(caught_up, RunSegment)
    assert (caught_up.round, caught_up.bundle) == (2, "3/0")


def test_a_stale_score_is_no_reason_to_copy() -> None:
    for age, source in ((0, 2), (1, 3)):
        population = scheduler(max_score_age=age, ready_check_max_wait=1)
        population.start()
        reported([1.0, 2.0, 3.0, 9.0], population)
        for index in (0, 1, 2):  # member 3 is late with its second segment
            population.handle(Report(index, 1, float(index), f"{index}/1"))
        commands = population.handle(ReadyCheck())
        assert [command.source for command in commands if command.member == 0] == [source]  # type: ignore[union-attr]


def test_who_is_still_running_at_the_end_is_told_to_stop() -> None:
    population = scheduler(ready_check_max_wait=1, n_rounds=1)
    population.start()
    for index in (0, 1):
        population.handle(Report(index, 0, float(index), f"{index}/0"))
    assert population.handle(ReadyCheck()) == [StopSegment(2, 0), StopSegment(3, 0)]
    assert population.finished
    assert population.best is not None
    assert population.best.index == 1


def test_asynchronous_members_go_on_at_once() -> None:
    population = scheduler(mode="asynchronous", n_rounds=2)
    population.start()
    (first,) = population.handle(Report(0, 0, 5.0, "0/0"))
    assert (first.member, first.round, first.source) == (0, 1, None)  # type: ignore[union-attr]
    (second,) = population.handle(Report(1, 0, 4.0, "1/0"))
    assert (second.member, second.round, second.source) == (1, 1, 0)  # type: ignore[union-attr]
    for index, judged in ((0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)):
        assert not population.finished
        population.handle(Report(index, judged, 1.0, f"{index}/{judged}"))
    assert population.finished


def test_a_population_that_varies_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="varies nothing"):
        PBTConfig(hyperparams=())


def test_simulated_faults_never_stop_a_population() -> None:
    clusters = [simulate(seed) for seed in range(200)]
    assert sum(cluster.n_exploits for cluster in clusters) > 500
    assert sum(cluster.scheduler.failed_ready_checks for cluster in clusters) > 100
    assert any(member.state == "dead" for cluster in clusters for member in cluster.scheduler.members)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_fault_schedules(part: int) -> None:
    for seed in range(1000 * part, 1000 * (part + 1)):
        simulate(1_000_000 + seed)
