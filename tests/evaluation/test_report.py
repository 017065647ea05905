"""The report: complete, self-contained, escaped, the same from memory and from files, small and fast."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tailguard.errors import DataError
from tailguard.evaluation import assessment as assessments
from tailguard.evaluation import charts
from tailguard.evaluation.assessment import Fold, OptimumFound, calibrated
from tailguard.evaluation.definitions import DEFINITIONS
from tailguard.evaluation.ledger import TrialCount
from tailguard.evaluation.report import render
from tailguard.evaluation.training_record import RiskPromise, TrainingRecord
from tests.evaluation.results import assessed, foresight, market

SECTIONS = ("performance", "risk", "costs", "behaviour", "health", "integrity", "appendix")
CHARTS = ("equity", "underwater", "months", "returns", "costs", "weights", "turnover")


class Page(HTMLParser):
    """Ids, references and tags of a page; fails on tags that are not closed in order."""

    VOID = ("meta", "link", "br", "rect", "circle", "line", "path", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.references, self.tags, self.open, self.labels = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        said = dict(attributes)
        self.tags.append(tag)
        self.ids += [said["id"]] if "id" in said else []
        self.references += [said[name] for name in ("src", "href") if name in said]
        self.labels += [said.get("aria-label")] if tag == "svg" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def good():
    bars = market()
    strategy = foresight(bars, 0.56)
    quantiles = np.sort(np.random.default_rng(0).normal(0, 0.02, (len(strategy), 5)), axis=1)
    return assessed(
        bars,
        replace(strategy, quantiles=quantiles),
        folds=(Fold("fold 1", 0), Fold("fold 2", 1_000)),
        levels=np.array([0.1, 0.3, 0.5, 0.7, 0.9]),
        optimum=OptimumFound(4e-4, 5e-4, 5e-4),
        other_trials=np.column_stack([foresight(bars, 0.5, seed).returns for seed in range(3)]),
        features=lambda b: b.close[:, :, None],
    )


def test_every_section_and_chart_is_there_and_every_chart_has_words(good):
    page = Page(render(good))
    assert set(SECTIONS) <= set(page.ids)
    assert {f"chart-{name}" for name in (*CHARTS, "calibration")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.labels
    assert all(label and len(label) > 20 for label in page.labels)


def test_nothing_is_fetched_and_nothing_runs(good):
    page = Page(render(good))
    assert "script" not in page.tags
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    text = render(good)
    assert not re.findall(r"https?://|@import|url\(", text)


def test_the_first_screen_says_the_verdict_with_its_figures(good):
    text = render(good)
    first = text[: text.index('id="performance"')]
    assert "Evidence of skill" in first
    for name in (
        "Out-of-sample Sharpe",
        "Deflated Sharpe",
        "CVaR 5 %",
        "Maximum drawdown",
        "Turnover",
        "Break-even cost",
    ):
        assert name in first
    assert "8,766 per year" in first
    assert "80.0 %</b> of it" in first


def test_no_skill_is_said_as_loudly():
    bars = market()
    text = render(assessed(bars, foresight(bars, 0.5, 2)))
    assert "<strong>No evidence of skill</strong>" in text
    assert 'class="verdict no"' in text


def test_names_from_data_are_escaped():
    evil = '<script>alert("x")</script>&'
    bars = market(400, symbols=(evil, "BBB"))
    found = assessed(bars, foresight(bars, 0.55))
    found = replace(found, subject=replace(found.subject, run=evil, source=evil, facts=((evil, evil),)))
    record = TrainingRecord(alerts=({"name": evil, "step": 3, "meaning": evil},))
    text = render(found, record)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    Page(text)


def test_the_files_of_an_assessment_give_the_same_report(good, tmp_path):
    assessments.save(good, tmp_path, "test")
    assert render(assessments.load(tmp_path, "test")) == render(good)
    json.loads((tmp_path / "test.json").read_text())
    with pytest.raises(DataError, match="no evaluation 'validation'"):
        assessments.load(tmp_path, "validation")


def test_the_appendix_defines_every_measure_of_the_table(good):
    text = render(good)
    appendix = text[text.index('id="appendix"') :]
    for definition in DEFINITIONS:
        assert definition.name in text[: text.index('id="appendix"')]
        assert definition.name in appendix


def test_training_leaves_its_curves_alerts_and_the_cvar_path(good, tmp_path):
    rows = [
        {
            "step": s,
            "train/explained_variance": s / 10,
            "rollout/ep_rew_mean": 0.1,
            "risk/period_cvar": -0.05,
            "risk/dual": 1.5,
        }
        for s in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 7, "tra')
    (tmp_path / "alerts.jsonl").write_text(json.dumps({"step": 4, "name": "warn/x", "meaning": "Something."}) + "\n")
    record = TrainingRecord.read(tmp_path, RiskPromise(-0.04, 0.05, 250))
    assert len(record.rows) == 5
    text = render(good, record)
    page = Page(text)
    assert {"chart-health-0", "chart-health-1", "chart-cvar-path"} <= set(page.ids)
    assert "warn/x" in text
    assert "Something." in text
    assert "No alert in" not in text
    assert "No alert in 5 updates" in render(good, TrainingRecord(rows=record.rows))


def test_a_cvar_limit_is_judged_out_of_sample_by_the_same_quantity(good):
    logs = np.log1p(good.strategy.returns)
    periods = logs[: len(logs) // 20 * 20].reshape(-1, 20).sum(axis=1)
    tail, edge = 0.1 * len(periods), int(0.1 * len(periods))
    ordered = np.sort(periods)
    worst = float((ordered[:edge].sum() + (tail - edge) * ordered[edge]) / tail)  # the edge counts in part
    found, n = RiskPromise(-0.05, 0.1, 20).kept(good.strategy.returns)
    assert n == len(periods)
    assert found == pytest.approx(worst, rel=1e-9)
    assert "it held." in render(good, TrainingRecord(promise=RiskPromise(worst - 0.01, 0.1, 20)))
    assert "it did not hold." in render(good, TrainingRecord(promise=RiskPromise(worst + 0.01, 0.1, 20)))
    assert "judged by only" in render(good, TrainingRecord(promise=RiskPromise(-0.9, 0.05, 250)))
    assert "no whole period" in render(good, TrainingRecord(promise=RiskPromise(-0.9, 0.05, 10_000)))


def test_a_failed_leak_test_is_shouted(good):
    text = render(replace(good, checks=(("something", False),)))
    assert "Do not believe any figure of this page" in text
    assert 'class="failed"' in text


def test_leak_tests_on_the_data_find_a_feature_that_looks_ahead():
    bars = market(500)
    honest = assessed(bars, foresight(bars, 0.5), features=lambda b: b.close[:, :, None])
    assert all(held for _, held in honest.checks)
    cheat = assessed(bars, foresight(bars, 0.5), features=lambda b: np.roll(b.close, -1, axis=0)[:, :, None])
    assert [held for _, held in cheat.checks] == [False, True]


def test_coverage_of_true_quantiles_is_their_level_and_of_narrow_ones_is_not():
    """Rewards N(0, s): the discounted sum is normal with s / sqrt(1 - gamma^2)."""
    bars, gamma, levels = market(20_000), 0.8, np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    strategy = foresight(bars, 0.5)
    rewards = np.random.default_rng(3).normal(0.0, 0.01, len(strategy))
    strategy = replace(strategy, returns=np.expm1(rewards))
    from scipy.special import ndtri

    true = 0.01 / np.sqrt(1 - gamma**2) * ndtri(levels)
    wide = replace(strategy, quantiles=np.tile(true, (len(strategy), 1)))
    found = calibrated(wide, levels, gamma)
    assert found is not None
    assert found.worst < 0.02
    narrow = calibrated(replace(strategy, quantiles=0.3 * wide.quantiles), levels, gamma)
    assert narrow is not None
    assert narrow.worst > 0.15
    seen = np.arange(len(bars)) % 4 > 0  # of the other decisions the quantiles say anything
    anything = np.where(seen[strategy.first + 1 :][: len(strategy), None], true, 1.0)
    kept = calibrated(replace(strategy, quantiles=anything), levels, gamma, seen)
    assert kept is not None
    assert kept.worst < 0.02
    assert kept.n_predictions == pytest.approx(0.75 * found.n_predictions, abs=2)
    assert calibrated(strategy, levels, gamma) is None


def test_a_report_of_100_000_bars_is_made_in_seconds_and_small():
    bars = market(100_011, symbols=("AAA", "BBB", "CCC"))
    strategy = foresight(bars, 0.505)
    began = time.perf_counter()
    text = render(assessed(bars, strategy, TrialCount(3, 3, 1e-6)))
    assert time.perf_counter() - began < 10.0
    assert len(text.encode()) < 5e6
    Page(text)


def test_the_fraction_of_the_optimum_knows_its_error():
    """Both earn the same market with noise of their own: the error is that of the noise, not of the market."""
    rng = np.random.default_rng(0)
    shared = rng.normal(1e-3, 0.02, (400, 5_000))
    found = [
        OptimumFound.compare(0.8 * path + rng.normal(0, 1e-3, 5_000), path, 1e-3)
        for path in shared
        if path.mean() > 5e-4
    ]
    errors = [(one.fraction - 0.8) / one.fraction_stderr for one in found]
    assert 0.85 < np.std(errors) < 1.15
    assert OptimumFound.compare(np.zeros(200), np.zeros(200), 0.0).fraction is None


def test_thinning_keeps_the_peaks_and_the_ends():
    y = np.random.default_rng(0).normal(size=50_000)
    y[[777, 31_234]] = 99.0, -99.0
    kept = charts.thinned(y, 600)
    assert len(kept) <= 602
    assert {0, 777, 31_234, 49_999} <= set(kept.tolist())
    assert_array_equal(charts.thinned(y[:100], 600), np.arange(100))


@pytest.mark.parametrize(
    "span", [("2020-01-01", "2020-01-02"), ("2020-01-01", "2020-02-01"), ("2000-01-01", "2031-01-01")]
)
def test_time_ticks_are_few_and_inside(span):
    first, last = (np.datetime64(day, "ms") for day in span)
    ticks = charts.time_ticks(first, last)
    assert 3 <= len(ticks) <= 12
    assert all(first <= at <= last for at, _ in ticks)


@pytest.mark.parametrize("limits", [(0.9, 1.4), (0.5, 12.0), (0.01, 4e9)])
def test_log_ticks_are_few_and_inside(limits):
    ticks = charts.log_ticks(*limits)
    assert 3 <= len(ticks) <= 8
    assert all(limits[0] <= tick <= limits[1] for tick in ticks)
