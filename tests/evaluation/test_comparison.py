"""Train beside test, the simple rule beside the agent, and what the verdict says of both (M11)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tailguard.env import Costs
from tailguard.env.dataset import DataConfig, Dataset
from tailguard.evaluation.backtest import buy_and_hold, follow_targets
from tailguard.evaluation.comparison import (
    AGENT,
    EQUAL_WEIGHT,
    HOLD,
    RIDGE,
    compare,
    equal_weight,
    memorised,
    of_strategy,
    part_result,
    sharpe_stderr,
)
from tailguard.evaluation.report import render
from tailguard.evaluation.ridge import fit_ridge, forecasts, next_returns
from tailguard.evaluation.verdict import cost_share, judge
from tailguard.market import Bars
from tests.evaluation.results import FEES, ONE, RULES, assessed, foresight, market

CHEAP = Costs(fee_bps=1, half_spread_bps=0, slippage_bps=0, impact=0, borrow_bps_per_year=0)


def planted(n: int = 3_000, strength: float = 0.3, symbols: tuple[str, ...] = ("AAA",), seed: int = 0) -> Bars:
    """Returns of closes follow each other with this correlation; the open is the close before it."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0.0, 0.01, (n, len(symbols)))
    returns = noise.copy()
    for t in range(1, n):
        returns[t] += strength * returns[t - 1]
    close = 100 * np.exp(np.cumsum(returns, axis=0))
    open_ = np.vstack([np.full((1, len(symbols)), 100.0), close[:-1]])
    ts = np.datetime64("2022-01-01", "ms") + np.arange(n) * np.timedelta64(3_600_000, "ms")
    high, low = np.maximum(open_, close), np.minimum(open_, close)
    return Bars.from_arrays(ts, symbols, open_, high, low, close, np.full(close.shape, 1e9))


def dataset(bars: Bars, **more) -> Dataset:
    config = DataConfig(files=("bars.csv",), features=("return_1", "return_4"), warm_up=8, costs=CHEAP, **more)
    return Dataset.of(config, bars)


def result_of(sharpe: float, n: int, part: str = "test", seed: int = 0):
    """The figures of a record whose Sharpe ratio per bar is drawn around the given one."""
    bars = market(n + 20, seed=1)
    own = foresight(bars, 0.5)
    returns = np.random.default_rng(seed).normal(0.01 * sharpe, 0.01, len(own))
    hold = buy_and_hold(bars, own.first, len(own), costs=FEES, account=RULES)
    return part_result(AGENT, part, replace(own, returns=returns), hold)


def test_the_standard_error_of_a_sharpe_ratio_is_its_spread_over_draws():
    draws = np.random.default_rng(0).standard_t(8, (3_000, 400)) * 0.01 + 0.001
    ratios = draws.mean(axis=1) / draws.std(axis=1, ddof=1)
    assert_allclose(np.mean([sharpe_stderr(row) for row in draws[:200]]), ratios.std(), rtol=0.05)


def test_an_agent_that_keeps_half_is_hardly_ever_said_to_have_memorised_and_one_that_keeps_nothing_is():
    """99 % under the law that the rule is about: train 0.15 per bar, test half of it."""
    kept = [memorised(result_of(0.15, 1_500, "train", i), result_of(0.075, 500, "test", 900 + i)) for i in range(150)]
    lost = [memorised(result_of(0.25, 1_500, "train", i), result_of(0.0, 900, "test", 900 + i)) for i in range(60)]
    assert np.mean(kept) <= 0.04
    assert np.mean(lost) >= 0.85


def test_nothing_is_memorised_where_nothing_was_earned():
    assert not memorised(result_of(0.0, 1_000, "train"), result_of(-0.3, 1_000))
    assert not memorised(result_of(-0.2, 1_000, "train"), result_of(-0.9, 1_000))


def test_a_market_that_rose_in_train_and_fell_in_test_is_no_memory():
    up, down = market(2_000, drift=1.5e-3), market(2_000, drift=-1.5e-3, seed=1)
    found = []
    for bars, part in ((up, "train"), (down, "test")):
        own = follow_targets(bars, np.full((1_900, 1), 0.8), 10, costs=FEES, account=RULES)
        found.append(part_result(AGENT, part, own, buy_and_hold(bars, 10, 1_900, costs=FEES, account=RULES)))
    assert found[0].sharpe > 3.0 > -3.0 > found[1].sharpe
    assert not memorised(*found)


def verdict_with(comparison, strategy=None):
    bars = market()
    own = strategy or foresight(bars, 0.5, seed=4)
    hold = buy_and_hold(bars, own.first, len(own), costs=FEES, account=RULES)
    return judge(own, hold, ONE, comparison=comparison, n_resamples=300)


def test_the_verdict_says_memorised_and_only_then():
    parts = (result_of(0.3, 2_000, "train"), result_of(0.0, 900, "test", 1))
    said = verdict_with(parts)
    assert said.memorised
    assert any(reason.startswith("It memorised its training bars: Sharpe ratio") for reason in said.reasons)
    for fine in ((), parts[:1], (parts[0], result_of(0.3, 900, "test", 2))):
        verdict = verdict_with(fine)
        assert not verdict.memorised
        assert not any("memorised" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(("name", "words"), [(RIDGE, "A ridge regression on the same"), (HOLD, "Holding the market")])
def test_the_verdict_says_that_a_simple_rule_is_enough_and_only_then(name, words):
    agent, good, bad = result_of(0.05, 900), result_of(0.3, 900), result_of(0.0, 900, seed=5)
    said = verdict_with((agent, replace(good, strategy=name)))
    assert said.enough == name
    assert said.reasons[-1].startswith(words)
    assert "no agent is needed" in said.reasons[-1]
    assert verdict_with((agent, replace(bad, strategy=name))).enough == ""
    assert verdict_with((good, replace(agent, strategy=name))).enough == ""


def test_costs_that_eat_the_profit_are_said_first_with_what_to_change():
    bars, dear = market(), FEES.replace(fee_bps=8)
    eager = foresight(bars, 0.57, costs=dear)
    assert cost_share(eager) == pytest.approx(eager.costs.sum() / (eager.returns + eager.costs).sum())
    said = verdict_with((), eager)
    assert said.cost_share > 0.5
    assert said.reasons[0].startswith(f"It trades too much: costs eat {'all' if said.cost_share > 1 else ''}")
    assert "no_trade_band" in said.reasons[0]
    calm = verdict_with((), foresight(bars, 0.57))
    assert 0.0 < calm.cost_share < 0.5
    assert not any("trades too much" in reason for reason in calm.reasons)


def test_the_regression_is_the_closed_form_on_train_and_sees_no_later_bar():
    data = dataset(planted())
    rows = data.split.train.rows
    x, y = data.features[rows, 0].astype(np.float64), next_returns(data)[rows, 0]
    centred = x - x.mean(axis=0)
    gram = centred.T @ centred
    beta = np.linalg.solve(gram + 0.1 * np.trace(gram) / 2 * np.eye(2), centred.T @ (y - y.mean()))
    wanted = (data.features[:, 0] - x.mean(axis=0)) @ beta
    found = forecasts(data, rows, 0.1, shared=False)
    assert_allclose(found[:, 0], wanted / wanted[rows].std(), rtol=1e-9)
    later = dataset(planted().scale_after(data.split.test.start, 3.0))
    assert_array_equal(forecasts(later, rows, 0.1, False)[rows], found[rows])
    assert_allclose(next_returns(data)[:-2, 0], data.bars.open[2:, 0] / data.bars.open[1:-1, 0] - 1)


def test_a_planted_signal_is_found_and_noise_is_not():
    data = dataset(planted())
    rule, test = fit_ridge(data), data.split.test
    assert_allclose(np.corrcoef(rule.targets[test.rows, 0], next_returns(data)[test.rows, 0])[0, 1], 0.3, atol=0.08)
    assert "per deviation" in rule.settings
    noise = [dataset(planted(strength=0.0, seed=seed)) for seed in range(6)]
    results = [fit_ridge(each).run(each.split.test.start, each.split.test.stop) for each in noise]
    found = [abs(part.returns.mean()) / (part.returns.std() + 1e-12) * len(part) ** 0.5 for part in results]
    assert np.mean(found) < 2.0


def test_without_validation_the_end_of_train_chooses():
    data = dataset(planted(), validation=0.0, train=0.7)
    assert data.split.validation is None
    assert "per deviation" in fit_ridge(data).settings


def test_a_panel_has_a_line_of_equal_weights():
    data = dataset(planted(symbols=("AAA", "BBB", "CCC")))
    test = data.split.test
    found = equal_weight(data, test.start, len(test))
    assert_allclose(found.weights[1:], 1 / 3, atol=0.04)
    agent = follow_targets(data.bars, np.zeros((len(test), 3)), test.start, costs=CHEAP, account=data.config.account)
    results, _ = compare(data, {"test": agent})
    assert [result.strategy for result in results] == [AGENT, RIDGE, HOLD, EQUAL_WEIGHT]
    assert_allclose(of_strategy(results, EQUAL_WEIGHT)["test"].bps_per_bar, 1e4 * found.returns.mean())


def test_the_first_screen_shows_the_parts_side_by_side():
    parts = (
        result_of(0.3, 2_000, "train"),
        result_of(0.1, 500, "validation"),
        result_of(0.0, 900),
        replace(result_of(0.2, 900), strategy=RIDGE),
    )
    bars = market()
    page = render(assessed(bars, foresight(bars, 0.5), comparison=parts))
    first = page.partition('id="first-screen"')[2].partition('id="performance"')[0]
    for words in (
        *(f"{r.part}, {r.n_bars:,} bars" for r in parts),
        f"{parts[0].sharpe:.2f} ±",
        '<th scope="row">ridge',
    ):
        assert words in first
    assert "comparison" not in render(assessed(bars, foresight(bars, 0.5))).partition('id="first-screen"')[2]
