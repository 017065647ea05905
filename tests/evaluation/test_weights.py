"""M9, M10: what leaves the product, replayed by twenty lines of numpy that know nothing of ours; tables by bars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tailguard.env import AccountRules, Costs
from tailguard.evaluation import assessment as assessments
from tailguard.evaluation.backtest import follow_targets, weights_frame
from tailguard.evaluation.report import month_table, render
from tailguard.market import Bars
from tests.evaluation.results import ONE, assessed, foresight
from tests.market.market_data import random_bars
from tests.real_bars import real_frame

COSTS = Costs(fee_bps=2, half_spread_bps=1, slippage_bps=1, impact=0, borrow_bps_per_year=50)
FIRST = 20
PANEL = AccountRules(gross_cap=0.9, no_trade_band=0.02)
MARKETS = {
    "hourly, never closed": (("crypto/bitstamp_btcusd_1h_2018_2022",), AccountRules()),
    "hourly, weekends missing": (("fx/eurusd_1h_ask_2017",), AccountRules(long_only=True, no_trade_band=0.05)),
    "daily": (("equity/googl_1d_2009_2018",), AccountRules(gross_cap=0.8)),
    "daily panel of 29 names": (("equity/dj30_1d_2020_2021",), PANEL),
    "5 minutes, gaps in one of three": (
        tuple(f"crypto/freqtrade_{name}btc_5m" for name in ("eth", "ltc", "ada")),
        PANEL,
    ),
}


def replayed(weights: pl.DataFrame, bars: pl.DataFrame, fee: float, adverse: float, borrow: float) -> np.ndarray:
    """Growth of 1 at the closes of the bars that `weights` fills. Rates are fractions; `borrow` is per bar."""
    opens, closes = (bars.pivot("symbol", index="ts", values=name).sort("ts") for name in ("open", "close"))
    symbols = opens.columns[1:]
    asked = weights.pivot("symbol", index="fill_at", values="weight")
    asked = opens.select(fill_at="ts").join(asked, on="fill_at", how="left").select(symbols).to_numpy()
    open_ = opens.select(symbols).to_numpy()
    close = closes.select(pl.col(symbols).forward_fill().fill_null(1.0)).to_numpy()
    cash, units, equity = 1.0, np.zeros(len(symbols)), []
    for t in np.flatnonzero(np.isfinite(asked).any(axis=1)):
        worth = cash + units @ close[t - 1]  # decided at this close
        traded = np.where(np.isfinite(open_[t]), asked[t] * worth / close[t - 1] - units, 0.0)
        paid = np.nan_to_num(open_[t]) * (1 + np.sign(traded) * adverse)
        cash, units = cash - traded @ paid - fee * np.abs(traded) @ paid, units + traded
        cash -= borrow * (np.maximum(-units * close[t], 0).sum() + max(-cash, 0))
        equity.append(cash + units @ close[t])
    return np.array(equity)


def rates(bars: Bars, costs: Costs = COSTS) -> tuple[float, float, float]:
    adverse = costs.half_spread_bps + costs.slippage_bps
    return costs.fee_bps / 1e4, adverse / 1e4, costs.borrow_bps_per_year / 1e4 / bars.bars_per_year


def raw_actions(bars: Bars, n_steps: int) -> np.ndarray:
    """What a network answers: each asset anywhere, so that many together ask for far more than any cap."""
    rng = np.random.default_rng(0)
    slow = np.cumsum(rng.normal(0, 0.15, (n_steps, len(bars.symbols))), axis=0)
    return np.sin(slow) * 1.3  # beyond the bounds at times, and often within a band of the bar before


def gapped(n: int = 400) -> Bars:
    """Three symbols; one is listed late, one lacks bars in the middle, also at a decision and at a fill."""
    frame = random_bars(n, ("AAA", "BBB", "CCC")).frame.with_row_index("i")
    t = pl.col("i") // 3
    late = (pl.col("symbol") == "BBB") & (t < 60)
    missing = (pl.col("symbol") == "CCC") & ((t % 37 == 5) | t.is_between(100, 130))
    return Bars(frame.filter(~(late | missing)).drop("i"))


CLOSED = PANEL.replace(no_trade_windows=("09:00-12:00", "Fri 20:00-Sun 23:00"))


@pytest.mark.parametrize(
    "account", [AccountRules(), PANEL, CLOSED, AccountRules(long_only=True, gross_cap=1.5)], ids=str
)
def test_a_panel_with_gaps_gives_the_reports_equity(account):
    bars = gapped()
    n = len(bars) - FIRST - 2
    own = follow_targets(bars, raw_actions(bars, n), FIRST, costs=COSTS, account=account)
    assert_allclose(replayed(weights_frame(own), bars.frame, *rates(bars)), own.equity[1:], rtol=1e-9)


@pytest.mark.parametrize("market", MARKETS)
def test_real_bars_give_the_reports_equity_and_a_fill_one_bar_late_does_not(market):
    names, account = MARKETS[market]
    bars = Bars(real_frame(*names, n_bars=3_000))
    n = len(bars) - FIRST - 2
    own = follow_targets(bars, raw_actions(bars, n), FIRST, costs=COSTS, account=account)
    weights = weights_frame(own)
    assert weights.join(bars.frame, left_on="fill_at", right_on="ts", how="anti").height == 0  # every fill has a bar
    found = replayed(weights, bars.frame, *rates(bars))
    assert_allclose(found, own.equity[1:], rtol=1e-9)
    late = dict(zip(bars.ts[:-1].tolist(), bars.ts[1:].tolist(), strict=True))  # the next greater stamp
    shifted = weights.with_columns(
        fill_at=pl.Series([late[stamp] for stamp in weights["fill_at"].dt.replace_time_zone(None).to_list()])
        .cast(pl.Datetime("ms"))
        .dt.replace_time_zone("UTC")
    )
    assert not np.allclose(replayed(shifted, bars.frame, *rates(bars))[-1], own.equity[-1], rtol=1e-6)


def test_a_weight_is_under_the_cap_inside_its_bounds_and_unchanged_within_the_band():
    bars = gapped()
    account = AccountRules(gross_cap=0.9, no_trade_band=0.05, long_only=True)
    raw = raw_actions(bars, 300)
    own = follow_targets(bars, raw, FIRST, costs=COSTS, account=account)
    assert np.abs(raw).sum(axis=1).max() > 2.0
    assert own.requested.min() >= 0.0
    held = np.concatenate([np.zeros((1, 3)), own.weights[:-1]])
    quiet = own.requested == held
    assert 0.1 < quiet.mean() < 0.9
    ordered = np.where(quiet, 0.0, own.requested)
    assert ordered.sum(axis=1).max() <= 0.9 + 1e-12
    unlisted = ~bars.tradable[: FIRST + 300].cumsum(axis=0)[FIRST:].astype(bool)
    assert unlisted.any()
    assert (own.requested[unlisted] == 0.0).all()


def test_after_ruin_nothing_is_asked_and_the_replay_ends_where_the_account_does():
    price = np.repeat([100.0, 100.0, 40.0, 10.0, 8.0, 9.0, 9.0], [25, 1, 1, 1, 1, 1, 5])[:, None]
    ts = np.datetime64("2024-01-01", "ms") + np.arange(len(price)) * np.timedelta64(3_600_000, "ms")
    bars = Bars.from_arrays(ts, ["AAA"], price, price, price, price, np.ones_like(price))
    own = follow_targets(bars, np.ones((12, 1)), FIRST, costs=COSTS, account=AccountRules(ruin_fraction=0.2))
    assert np.isnan(own.requested[-1, 0])
    weights = weights_frame(own)
    n = weights.height
    assert 0 < n < 12
    assert_allclose(replayed(weights, bars.frame, *rates(bars)), own.equity[1 : n + 1], rtol=1e-9)
    assert own.equity[n] == own.equity[-1]


def test_both_moments_are_named_over_a_weekend():
    """Daily bars: Friday's decision is made when Friday is over and filled at Monday's open."""
    days = np.arange("2024-03-01", "2024-06-01", dtype="datetime64[D]")
    days = days[np.is_busday(days)].astype("datetime64[ms]")
    price = 100 + np.arange(len(days), dtype=float)[:, None]
    bars = Bars.from_arrays(days, ["AAA"], price, price, price, price, np.ones_like(price))
    weights = weights_frame(follow_targets(bars, np.ones((40, 1)), 5, costs=COSTS, account=AccountRules()))
    assert weights.columns == ["decided_at", "fill_at", "symbol", "weight"]
    friday = weights.filter(pl.col("decided_at").dt.weekday() == 6)  # Saturday 00:00 is the end of Friday
    assert friday.height >= 7
    assert set(friday["fill_at"].dt.weekday()) == {1}
    assert ((friday["fill_at"] - friday["decided_at"]).dt.total_days() == 2).all()
    assert weights["fill_at"].dtype == bars.frame["ts"].dtype
    assert weights.join(bars.frame, left_on="fill_at", right_on="ts").height == weights.height


def test_months_and_years_are_those_of_the_bars():
    """Daily bars over two years that earn in the last bar of each month alone: that month has the return."""
    days = np.arange("2022-01-01", "2024-01-01", dtype="datetime64[D]")
    last = np.append(days[1:].astype("datetime64[M]") != days[:-1].astype("datetime64[M]"), True)
    gain = np.where(last, 1.0002 + np.arange(len(days)) / 1e4, 1.0)
    close = 100 * np.cumprod(gain)[:, None]
    open_ = np.concatenate([[[100.0]], close[:-1]])
    arrays = (open_, np.maximum(open_, close), np.minimum(open_, close), close, np.ones_like(close))
    bars = Bars.from_arrays(days.astype("datetime64[ms]"), ["AAA"], *arrays)
    free = Costs(fee_bps=0, half_spread_bps=0, slippage_bps=0, impact=0, borrow_bps_per_year=0)
    own = follow_targets(bars, np.ones((len(days) - 1, 1)), 0, costs=free, account=AccountRules())
    rows = month_table(own)
    assert [year for year, *_ in rows] == [2022, 2023]  # no 2024: no bar of the data is in it
    expected = [f"+{value:.1%}" for value in gain[last] - 1.0]
    assert [cell.text for _, cells, _ in rows for cell in cells] == expected
    years = days[last].astype("datetime64[Y]").astype(int) + 1970
    assert [total for *_, total in rows] == [f"+{np.prod(gain[last][years == y]) - 1:.1%}" for y in (2022, 2023)]
    page = render(assessed(bars, own))
    assert "2022-01-02" in page
    assert "2023-12-31" in page
    assert "2024-01-01" not in page


def test_an_evaluation_of_an_earlier_version_is_read_with_both_moments(tmp_path: Path):
    """Format 1 had the closes `decided` and `ts`, and the raw answers of the policy as `target:SYMBOL`."""
    days = random_bars(400, ("AAA", "BBB"))
    own = follow_targets(days, raw_actions(days, 300), FIRST, costs=COSTS, account=AccountRules())
    found = assessed(days, own, ONE)
    assessments.save(found, tmp_path, "test")
    table = pl.read_parquet(tmp_path / "test.parquet")
    assert {"decided_at", "fill_at", "requested:AAA", "weight:AAA"} <= set(table.columns)
    assert not {"ts", "decided", "target:AAA"} & set(table.columns)
    step = pl.duration(milliseconds=int(days.step.astype(int)))
    old = table.with_columns(decided=pl.col("decided_at"), ts=pl.col("fill_at") + step)
    old = old.with_columns(pl.Series(f"target:{name}", own.targets[:, i]) for i, name in enumerate(own.symbols))
    old.drop("decided_at", "fill_at", "requested:AAA", "requested:BBB").write_parquet(tmp_path / "test.parquet")
    (tmp_path / "test.json").write_text((tmp_path / "test.json").read_text().replace('"format": 2', '"format": 1'))
    again = assessments.load(tmp_path, "test").strategy
    assert_array_equal(again.fill_at, own.fill_at)
    assert_array_equal(again.decided_at, own.decided_at)
    assert_allclose(again.requested, own.requested, rtol=1e-12)
    assert_array_equal(assessments.returns_by_bar(tmp_path / "test.parquet")[0], own.fill_at)


def test_a_coin_on_several_assets_is_exported_as_it_was_asked():
    bars = random_bars(600, ("AAA", "BBB"))
    own = foresight(bars, 0.5)
    assert_allclose(np.abs(own.requested).sum(axis=1), 1.0)
