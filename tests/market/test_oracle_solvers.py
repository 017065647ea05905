"""The vectorised steps of the oracle solvers against the loops that define them, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tailguard.market.oracles import oracle_market, solver, tail
from tailguard.market.oracles.chain import Sizes
from tailguard.market.oracles.crash import binomial


def along(row: np.ndarray, place: float) -> float:
    """Linear between the entries of a row, beyond its ends along the last slope."""
    i = min(max(int(place), 0), len(row) - 2)
    return row[i] + (place - i) * (row[i + 1] - row[i])


@pytest.mark.parametrize("kind", ["regime", "signal", "pairs"])
def test_a_bar_is_the_expectation_over_its_cases(kind):
    sizes, rng = Sizes(states=19, weights=7, nodes=3), np.random.default_rng(0)
    chain, weights = oracle_market(kind).chain(sizes), solver.weight_grid(sizes.weights)
    value, holding = rng.normal(size=(2, 19, len(weights)))
    bar, first, mix = solver.Bar(chain, weights, holding), *solver.next_states(chain)
    expected, growth, squares = np.zeros((3, *value.shape))
    for x, j in np.ndindex(*value.shape):
        for k, prob in enumerate(chain.prob[x]):
            gain = max(1.0 + holding[x, j] * chain.ret[x, k], 1e-3)
            place = (holding[x, j] * chain.growth[x, k] / gain - weights[0]) / (weights[1] - weights[0])
            after = sum(mix[x, k, m] * along(value[first[x, k] + m], place) for m in range(4))
            growth[x, j] += prob * np.log(gain)
            squares[x, j] += prob * np.log(gain) ** 2
            expected[x, j] += prob * after
    assert_allclose(bar.expect(value), expected, rtol=1e-12, atol=1e-12)
    assert_allclose(bar.log_growth, growth, rtol=1e-12, atol=1e-15)
    assert_allclose(bar.log_growth_squared, squares, rtol=1e-12)


def test_the_best_weight_is_the_top_of_a_parabola_and_never_leaves_the_bounds():
    weights = solver.weight_grid(41)
    tops = np.array([-0.613, 0.0, 0.4321, 1.0])
    held = -((weights - tops[:, None]) ** 2)
    assert_allclose(solver.best_weight(held, weights, 0.0), tops, atol=1e-12)
    assert_allclose(solver.best_weight(held, weights, 0.2), np.minimum(tops + 0.1, 1.0), atol=1e-12)
    assert_allclose(solver.best_weight(held, weights, 9.0), 1.0)
    assert_allclose(solver.best_weight(np.zeros((2, len(weights))), weights, 0.0), -1.0)  # the first of equals


def test_trading_moves_to_the_band_and_pays_for_it():
    weights, rng = solver.weight_grid(11), np.random.default_rng(1)
    held = np.cumsum(rng.normal(size=(6, len(weights))), axis=1)
    low, high, value = solver.trade(held, weights, 0.01)
    assert (low <= high).all()
    for x, j in np.ndindex(*value.shape):
        target = min(max(weights[j], low[x]), high[x])
        kept = 1.0 - 0.01 * abs(target - weights[j])
        place = (target / kept - weights[0]) / (weights[1] - weights[0])
        assert_allclose(value[x, j], np.log(kept) + along(held[x], place), rtol=1e-12, atol=1e-12)


def test_shifted_sums_are_sums_along_the_levels():
    rng = np.random.default_rng(2)
    n_levels, n_columns, n_rows, n_terms = 9, 4, 5, 3
    shift, factor = rng.uniform(-12, 12, (n_rows, n_terms)), rng.normal(size=(n_rows, n_terms))
    column, table = rng.integers(0, n_columns, (n_rows, n_terms)), rng.normal(size=(n_levels, n_columns))
    sums = tail.ShiftedSums(n_levels, n_columns, shift, column, factor)
    expected = np.zeros((n_levels, n_rows))
    for y, r, k in np.ndindex(n_levels, n_rows, n_terms):
        expected[y, r] += factor[r, k] * along(table[:, column[r, k]], y + shift[r, k])
    assert_allclose(sums.all(table), expected, rtol=1e-10, atol=1e-10)
    rows = rng.integers(0, n_rows, (n_levels, 2))
    assert_allclose(sums.some(table, rows), np.take_along_axis(expected, rows, axis=1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cost_bps", [0.0, 50.0])
def test_the_limited_optimum_of_one_step_is_the_best_of_all_weights(cost_bps):
    """One step back from the end, the values of the options are those of the law of one bar."""
    market = oracle_market("crash", cost_bps=cost_bps)
    returns, prob = market.outcomes(5)
    grid = tail.make_grid(returns, prob, market.cost, 4, market.volatility, 6)
    bar = tail.Bar(grid, returns, prob, market.cost)
    choice, value, mean = tail.backward(bar, grid, 1, 3.0)
    y, step = len(grid.levels) // 2, grid.levels[1] - grid.levels[0]
    tail_reward, plain = grid.levels - 3.0 * np.maximum(-grid.levels, 0.0), grid.levels

    def after(values: np.ndarray, weight: float) -> np.ndarray:
        """(Y,) expectation of values (Y,) after one bar."""
        places = np.arange(len(values))[:, None] + np.log1p(weight * returns) / step
        return np.array([[along(values, place) for place in row] for row in places]) @ prob

    paid = np.log1p(-market.cost * grid.weights) / step  # from a flat start
    options = [along(after(tail_reward, w), y + p) for w, p in zip(grid.weights, paid, strict=True)]
    best = int(np.argmax(options))
    assert choice[0, y, 0] == best
    assert_allclose(value[y, 0], options[best], rtol=1e-10, atol=1e-14)
    assert_allclose(mean[y, 0], along(after(plain, grid.weights[best]), y + paid[best]), rtol=1e-10, atol=1e-14)


def test_a_binomial_law_is_a_repeated_coin():
    law = np.ones(1)
    for _ in range(30):
        law = np.convolve(law, [0.7, 0.3])
    assert_allclose(binomial(np.arange(31), 30, 0.3), law, rtol=1e-12)
    assert_allclose(binomial(np.arange(4), 3, 0.0), [1.0, 0.0, 0.0, 0.0])
    assert_allclose(binomial(np.arange(4), 3, 1.0), [0.0, 0.0, 0.0, 1.0])
