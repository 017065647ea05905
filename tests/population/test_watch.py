"""A population that is not well says so: copies that lose what was learned, scores that stand still, sick members."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tailguard import DistributionalPPO
from tailguard.health import metrics
from tailguard.policy import RecurrentPolicy
from tailguard.population import exploit as exploit_module
from tailguard.population.exploit import exploit
from tailguard.population.scheduler import Report
from tailguard.population.segment import Pace, SegmentOver
from tailguard.population.watch import Notice, Round, Vitals, Watch
from tests.agents import tiny_agent
from tests.environments import Countdown, vectorized
from tests.population.tiny import digest_of, tiny_population

RATIO, DROP = metrics.EXPLOIT_VALUE_RATIO.name, metrics.EXPLOIT_EXPLAINED_VARIANCE_DROP.name


def agent_of(seed: int) -> DistributionalPPO:
    return tiny_agent(vectorized(Countdown, 4, seed), seed=seed, learning_rate=5e-3, n_epochs=4, gamma=0.95)


def vitals_of(agent: DistributionalPPO, updates: int) -> Vitals:
    """Train as a segment does."""
    pace = Pace(updates, lambda: None)
    with pytest.raises(SegmentOver):
        agent.learn(10**6, pace, reset_num_timesteps=False)
    return pace.vitals


def copied(source: Path, forget: pytest.MonkeyPatch | None) -> DistributionalPPO:
    """A copy of the source; with a patch, one whose weights are forgotten and nobody looks."""
    agent = agent_of(seed=1)
    if forget is not None:
        forget.setattr(RecurrentPolicy, "load_state_dict", lambda self, state, strict=True: None)
        forget.setattr(exploit_module, "require_same", lambda agent, saved, strategy: None)
    exploit(agent, source, {})
    return agent


@pytest.mark.parametrize("forgets", [False, True], ids=["whole_copy", "weights_forgotten"])
def test_a_copy_that_loses_what_its_source_learned_is_seen_in_its_first_updates(
    forgets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = agent_of(seed=0)
    before = vitals_of(source, 40)
    source.save(tmp_path / "source")
    changed = vitals_of(copied(tmp_path / "source", monkeypatch if forgets else None), 3).since_copy(before.last())
    raised = {notice.alert.name for notice in told([Report(1, 1, 1.0, "b", changed), Report(1, 2, 2.0, "b")])}
    assert (changed[RATIO] > 2.0) == forgets, changed
    assert raised == ({"warn/exploit_value_spike", "warn/exploit_explained_variance_drop"} if forgets else set())


def test_one_or_two_updates_are_too_few_to_judge_a_copy_by(tmp_path: Path) -> None:
    source = agent_of(seed=0)
    before = vitals_of(source, 3).last()
    source.save(tmp_path / "source")
    copy = copied(tmp_path / "source", None)
    assert vitals_of(copy, 2).since_copy(before) == {}
    assert RATIO in vitals_of(copy, 3).since_copy(before)


def rounds(reports: Iterable[Report]) -> list[Round]:
    watch = Watch()
    ended = [watch.follow(report) for report in reports]
    return [one for one in (*ended, watch.close()) if one is not None]


def told(reports: Iterable[Report]) -> list[Notice]:
    return [notice for one in rounds(reports) for notice in one.notices]


def scored(*by_round: Sequence[float]) -> list[Report]:
    return [
        Report(member, number, score, "b")
        for number, scores in enumerate(by_round)
        for member, score in enumerate(scores)
    ]


def test_scores_that_no_longer_rise_are_said_once_with_the_round_since_when() -> None:
    rising, standing = [(1.0 + n, 0.5) for n in range(4)], [(3.9, 0.5)] * 12
    (notice,) = told(scored(*rising, *standing))
    assert notice.alert.name == "warn/stuck_population"
    assert notice.since == 5
    assert ", since round 5. " in notice.sentence()
    assert told(scored(*((1.0 + 0.1 * n, 0.5) for n in range(30)))) == []


@pytest.mark.parametrize(
    ("scores", "since"),
    [
        ([(0.0, 0.0)] * 5, 1),  # nobody ever did anything
        ([(1.0, 5.0), *[(n, n) for n in (6.0, 7.0, 8.0)]], 2),  # a score that moves by itself, the same for all
        ([(1.0, 5.0), *[(3.0, 3.0)] * 3], 2),  # all fell to the same place
    ],
    ids=["from_the_start", "together", "fallen"],
)
def test_members_that_are_all_alike_are_said(scores: list[tuple[float, float]], since: int) -> None:
    (notice,) = told(scored(*scores))
    assert (notice.alert.name, notice.since, notice.member) == ("warn/members_alike", since, None)


def test_members_that_all_rose_to_one_score_and_stay_there_are_not_sick() -> None:
    assert told(scored((20.0, 90.0), (90.0, 500.0), *[(500.0, 500.0)] * 6, (480.0, 500.0), (500.0, 500.0))) == []
    assert told(scored((-5.0, -1.0), *[(0.0, 0.0)] * 8)) == []  # losers who learned not to play


def test_the_copy_with_the_largest_loss_is_named_and_who_is_late_does_not_count() -> None:
    reports = [
        *scored((1.0, 2.0, 3.0)),
        Report(0, 1, 2.0, "b", {RATIO: 1.1}),
        Report(1, 1, 3.0, "b", {RATIO: 4.0}),
        Report(2, 2, 5.0, "b"),
        Report(2, 1, 9.0, "b", {RATIO: 99.0}),
    ]
    (notice,) = told(reports)
    assert (notice.member, notice.value, notice.since) == (1, 4.0, 2)
    assert [one.number for one in rounds(reports)] == [1, 2, 3]


def test_scores_that_are_not_finite_leave_the_others_to_be_judged() -> None:
    (one,) = rounds(scored((float("nan"), 1.0)))
    assert one.figures == {metrics.BEST_SCORE.name: 1.0}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_populations_rounds_and_its_members_alerts_are_written_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = [{"name": "learning_rate", "low": 1e-13, "high": 1e-12}]  # nobody learns
    with caplog.at_level(logging.WARNING):
        digest_of(tiny_population(rounds=3, hyperparams=frozen), tmp_path)
    rows, alerts = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "alerts.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(metrics.SCORE_SPREAD.name in row for row in rows)
    assert rows[1]["warn/learning_rate_floor"] == 1.0
    assert list((tmp_path / "tensorboard").iterdir())
    own = next(line for line in alerts if line["alert"] == "warn/learning_rate_floor")
    assert own["member"] in range(4)
    assert {"step", "metric", "value", "since", "meaning", "advice"} <= set(own)
    assert f"since round 2 of member {own['member']}. The learning rate is zero" in caplog.text


def test_a_driver_that_goes_on_writes_the_same_rounds(tmp_path: Path) -> None:
    config = tiny_population()
    digest_of(config, tmp_path)
    before = [{**row, "time": 0} for row in lines(tmp_path / "metrics.jsonl")]
    digest_of(config, tmp_path)  # finished already: all is replayed
    assert [{**row, "time": 0} for row in lines(tmp_path / "metrics.jsonl")] == before
