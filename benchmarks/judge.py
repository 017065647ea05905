"""The verdict alone, on records whose truth is known: how often it calls skill where there is none, and where there is.

`python -m benchmarks.judge [--records 2000]` (a few minutes of one core). "Before" is the same verdict without its
allowance for a loss that the record has not met.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.results import markdown_table, parser_of, publish
from tailguard.evaluation import measures
from tailguard.evaluation.backtest import Backtest
from tailguard.evaluation.ledger import TrialCount
from tailguard.evaluation.significance import probabilistic_sharpe
from tailguard.evaluation.unseen_loss import UNSEEN_LOSS
from tailguard.evaluation.verdict import CONFIDENCE, judge, tail_doubt

MODULE = "benchmarks.judge"
DAILY, LENGTHS = 252.0, (250, 500, 1_000, 2_000, 4_000)
RATE, QUIET, NOISE = 0.002, 5e-4, 0.01
"""Probability of the rare loss per bar, deviation of a bar without it, deviation of a bar of the other laws."""
SIZES = (0.02, 0.05, 0.1)
FLOORS = (0.0, 0.05, UNSEEN_LOSS, 0.2, 0.3)
N_RESAMPLES = 300
ONE = TrialCount(1, 1, 0.0)

Array = npt.NDArray[np.float64]
Law = Callable[[np.random.Generator, int, int], Array]


def gaussian(rng: np.random.Generator, n_records: int, n_bars: int) -> Array:
    return rng.normal(0.0, NOISE, (n_records, n_bars))


def garch_t(rng: np.random.Generator, n_records: int, n_bars: int) -> Array:
    """GARCH(1, 1) with shocks of Student's t of five degrees of freedom, all of mean zero."""
    alpha, beta, burn = 0.08, 0.9, 200
    shocks = rng.standard_t(5, (n_bars + burn, n_records)) * (3 / 5) ** 0.5
    variance, out = np.ones(n_records), np.empty((n_bars + burn, n_records))
    for t, shock in enumerate(shocks):
        out[t] = variance**0.5 * shock
        variance = 1.0 - alpha - beta + alpha * out[t] ** 2 + beta * variance
    return NOISE * out[burn:].T


def rare_loss(size: float) -> Law:
    """Small gains, and rarely a loss that takes all of them: the mean is zero."""

    def law(rng: np.random.Generator, n_records: int, n_bars: int) -> Array:
        records = rng.normal(RATE * size, QUIET, (n_records, n_bars))
        records[rng.random(records.shape) < RATE] -= size
        return records

    return law


def true_sharpe(annual: float, noise: float) -> Law:
    """Gaussian returns with this Sharpe ratio a year."""

    def law(rng: np.random.Generator, n_records: int, n_bars: int) -> Array:
        return rng.normal(annual * noise / DAILY**0.5, noise, (n_records, n_bars))

    return law


LAWS: dict[str, Law] = {
    "Gaussian": gaussian,
    "GARCH-t": garch_t,
    **{f"-{size:.0%} with probability {RATE}": rare_loss(size) for size in SIZES},
}


def record_of(returns: Array) -> tuple[Backtest, Backtest]:
    """A fully invested account that earned these returns without costs, beside a market that did not move."""
    n = len(returns)
    ts = np.datetime64("2000-01-03", "ms") + np.arange(n + 1) * np.timedelta64(86_400_000, "ms")
    held, nothing = np.ones((n, 1)), np.zeros(n)
    own = Backtest(("A",), DAILY, 0, ts[1:], ts[1:], returns, nothing, np.full(n, 0.1), held, held, held)
    return own, Backtest(("A",), DAILY, 0, ts[1:], ts[1:], nothing, nothing, nothing, held, held, held)


def skill_shares(records: Array, floors: tuple[float, ...], seed: int = 0) -> Array:
    """(len(floors),) share of records that are called skill when a loss of that part of equity is allowed for.

    Skill needs a deflated Sharpe ratio of 95 %, so records without it are not resampled.
    """
    called = np.zeros(len(floors))
    for i, returns in enumerate(records):
        found = measures.sharpe_per_bar(returns), len(returns), measures.skewness(returns), measures.kurtosis(returns)
        if probabilistic_sharpe(*found) < CONFIDENCE:
            continue
        own, hold = record_of(returns)
        verdict = judge(own, hold, ONE, may_lose=0.0, n_resamples=N_RESAMPLES, seed=seed + i)
        if verdict.skill:
            called += [not tail_doubt(own, verdict.mean_stderr, floor) for floor in floors]
    return called / len(records)


def tables(n_records: int) -> str:
    """False skill per law and length, then power and the worst false skill per allowance."""
    rng, header = np.random.default_rng(0), [f"{n:,} bars" for n in LENGTHS]
    before_after, worst = [], np.zeros(len(FLOORS))
    for name, law in LAWS.items():
        cells = [skill_shares(law(rng, n_records, n), FLOORS) for n in LENGTHS]
        worst = np.maximum(worst, np.max(cells, axis=0))
        chosen = FLOORS.index(UNSEEN_LOSS)
        before_after.append([name, *(f"{cell[0]:.1%} / {cell[chosen]:.1%}" for cell in cells)])
    powers = {
        noise: skill_shares(true_sharpe(2.0, noise)(rng, n_records, int(4 * DAILY)), FLOORS) for noise in (0.01, 0.005)
    }
    floors = [
        [f"{floor:.0%}", f"{worst[j]:.1%}", *(f"{power[j]:.1%}" for power in powers.values())]
        for j, floor in enumerate(FLOORS)
    ]
    return "\n\n".join(
        [
            f"Share of {n_records:,} records of mean zero that are called skill, before / after allowing for a loss of "
            f"{UNSEEN_LOSS:.0%} of what is held that the record has not met. Wanted: at most 5 %.",
            markdown_table(["law", *header], before_after),
            "The allowance was chosen by this table: the worst false skill of all cells above, and the power on a true "
            "Sharpe ratio of 2 a year over four years of daily bars (Gaussian).",
            markdown_table(["allowance", "worst false skill", *(f"power at {n:.1%} a bar" for n in powers)], floors),
        ]
    )


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--records", type=int, default=2_000)
    given = parser.parse_args()
    publish("judge", "The verdict on records whose truth is known", MODULE, tables(given.records), given.dry)


if __name__ == "__main__":
    main()
