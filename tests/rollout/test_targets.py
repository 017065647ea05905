"""C5 and C6 on arrays: critic targets are samples of the law of the return, stratified over horizons and levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from tailguard.losses.risk import interpolation_weights, midpoint_levels, tail_levels
from tailguard.rollout.targets import draw_horizons, episode_ends, resample, return_law_samples, rewards_to_go

GAMMA = 0.9


def samples(
    rewards: list[float], dones: list[int], lam: float, law_at: float = 50.0, terminal: dict[int, float] | None = None
) -> np.ndarray:
    """Targets of one environment whose critic predicts law_at + t at every step t."""
    n = len(rewards)
    law = (law_at + np.arange(n + 1))[:, None, None] * np.ones((1, 1, 4))
    terminal_law = {(t, 0): np.full(4, value) for t, value in (terminal or {}).items()}
    return return_law_samples(
        np.array(rewards)[:, None],
        law,
        terminal_law,
        np.array(dones, bool)[:, None],
        GAMMA,
        lam,
        midpoint_levels(4),
        np.random.default_rng(0),
    )[:, 0]


def test_horizon_one_is_the_one_step_bellman_target() -> None:
    targets = samples([1.0, 2.0, 3.0], [0, 0, 0], lam=0.0)
    np.testing.assert_allclose(targets, [[1 + GAMMA * 51] * 4, [2 + GAMMA * 52] * 4, [3 + GAMMA * 53] * 4])


def test_an_endless_horizon_sums_to_the_rollouts_end_and_bootstraps_there() -> None:
    targets = samples([1.0, 2.0, 3.0], [0, 0, 0], lam=1.0)
    assert targets[0, 0] == pytest.approx(1 + GAMMA * 2 + GAMMA**2 * 3 + GAMMA**3 * 53)


def test_the_sum_stops_at_a_termination_with_nothing_ahead() -> None:
    targets = samples([1.0, 2.0, 100.0], [0, 1, 0], lam=1.0)
    np.testing.assert_allclose(targets[0], 1 + GAMMA * 2)
    np.testing.assert_allclose(targets[1], 2.0)
    np.testing.assert_allclose(targets[2], 100 + GAMMA * 53)


def test_a_truncation_bootstraps_from_its_terminal_observation() -> None:
    targets = samples([1.0, 2.0, 100.0], [0, 1, 0], lam=1.0, terminal={1: 30.0})
    np.testing.assert_allclose(targets[0], 1 + GAMMA * 2 + GAMMA**2 * 30)


def test_ends_and_sums_follow_the_episodes() -> None:
    dones = np.array([[0], [1], [0], [0]], bool)
    np.testing.assert_array_equal(episode_ends(dones)[:, 0], [2, 2, 4, 4])
    np.testing.assert_allclose(rewards_to_go(np.ones((4, 1)), dones, GAMMA)[:, 0], [1 + GAMMA, 1.0, 1 + GAMMA, 1.0])


def test_the_horizons_of_a_step_are_stratified_over_the_geometric_law_in_random_order() -> None:
    n, lam = 32, 0.95
    horizons = draw_horizons(20_000, n, lam, 10**6, np.random.default_rng(0))
    edges = np.log(1.0 - np.arange(n) / n) / np.log(lam)  # where its equal parts begin
    ordered = np.sort(horizons, -1)
    assert (ordered >= np.maximum(np.ceil(edges), 1)).all()
    assert (ordered[:, :-1] <= np.ceil(edges[1:])).all()
    assert horizons.mean() == pytest.approx(20.0, rel=0.02)
    np.testing.assert_allclose(
        horizons.mean(0), 20.0, rtol=0.15
    )  # no sample, so no level, has long horizons for its own


@pytest.mark.parametrize("lam, horizon", [(0.0, 1), (1.0, 7)])
def test_the_ends_of_lambda_leave_nothing_to_chance(lam: float, horizon: int) -> None:
    assert (draw_horizons(3, 4, lam, 7, np.random.default_rng(0)) == horizon).all()


def test_a_sum_goes_on_from_an_invalid_step_to_the_next_valid_one() -> None:
    rewards, law = np.array([[1.0], [2.0], [4.0], [8.0]]), 50.0 + np.arange(5)[:, None, None] * np.ones((1, 1, 2))
    valid, dones = np.array([[True], [False], [False], [True]]), np.zeros((4, 1), bool)
    levels, rng = midpoint_levels(2), np.random.default_rng(0)
    targets = return_law_samples(rewards, law, {}, dones, 0.5, 0.0, levels, rng, valid)
    np.testing.assert_allclose(targets[0, 0], 1 + 2 / 2 + 4 / 4 + 53 / 8)
    dones[1] = True
    targets = return_law_samples(rewards, law, {}, dones, 0.5, 0.0, levels, rng, valid)
    np.testing.assert_allclose(targets[0, 0], 1 + 2 / 2)


LAWS = {
    "normal": stats.norm(0.5, 1.0),
    "exponential": stats.expon(scale=2.0),
    "two-point": stats.rv_discrete(values=([-10.0, 1.0], [0.1, 0.9])),  # a rare loss
}
MIDPOINTS = midpoint_levels(32)


def rollout_of(law: str, n_steps: int = 24, n_envs: int = 3) -> dict[str, Any]:
    """A rollout with rewards of some law, an episode that terminates, one that is truncated, and skewed critics."""
    rng = np.random.default_rng(3)
    dones = np.zeros((n_steps, n_envs), bool)
    dones[9, 0] = dones[14, 1] = True
    quantiles = np.sort(rng.gamma(0.7, 6.0, (n_steps + 1, n_envs, 32)), -1)
    terminal = {(14, 1): -quantiles[0, 0, ::-1]}
    rewards = LAWS[law].rvs(size=dones.shape, random_state=rng).astype(np.float64)
    return {"rewards": rewards, "law": quantiles, "terminal_law": terminal, "dones": dones}


def one_horizon_samples(
    rollout: dict[str, Any], step: int, env: int, lam: float, rng: np.random.Generator
) -> np.ndarray:
    """The definition, one sample at a time: a geometric horizon and a uniform level for each."""
    rewards, dones, found = rollout["rewards"][:, env], rollout["dones"][:, env], []
    levels = rng.uniform(0.001, 0.999, 20_000)
    for horizon, weights in zip(
        rng.geometric(1.0 - lam, 20_000), interpolation_weights(MIDPOINTS, levels).T, strict=True
    ):
        total, now, ended = 0.0, step, False
        while now < len(rewards) and now < step + horizon and not ended:
            total, ended, now = total + GAMMA ** (now - step) * rewards[now], bool(dones[now]), now + 1
        ahead = rollout["terminal_law"].get((now - 1, env), np.zeros(32)) if ended else rollout["law"][now, env]
        found.append(total + GAMMA ** (now - step) * ahead @ weights)
    return np.array(found)


@pytest.mark.parametrize("law", LAWS)
def test_samples_have_the_law_of_a_single_horizon_drawn_for_each(law: str) -> None:
    rollout, lam = rollout_of(law), 0.8
    rng = np.random.default_rng(5)
    drawn = np.stack(
        [return_law_samples(**rollout, gamma=GAMMA, lam=lam, levels=MIDPOINTS, rng=rng) for _ in range(300)]
    )
    for step, env in [(2, 0), (11, 1), (4, 2), (21, 2)]:
        wanted = np.sort(one_horizon_samples(rollout, step, env, lam, rng))
        ours = np.sort(drawn[:, step, env].reshape(-1))
        at = np.quantile(wanted, np.linspace(0.02, 0.98, 33)) + 1e-9
        share = [np.searchsorted(sample, at) / len(sample) for sample in (ours, wanted)]
        np.testing.assert_allclose(*share, atol=0.02)


def test_the_mean_over_many_draws_is_the_lambda_return_and_single_draws_lie_near_it() -> None:
    rollout, lam = rollout_of("two-point"), 0.8
    rng = np.random.default_rng(6)
    drawn = np.stack(
        [return_law_samples(**rollout, gamma=GAMMA, lam=lam, levels=MIDPOINTS, rng=rng) for _ in range(1_000)]
    )
    at = (np.arange(32)[:, None] + np.linspace(1e-3, 1.0 - 1e-3, 1_000)).reshape(-1) / 32
    mean = interpolation_weights(MIDPOINTS, at).mean(1)  # of the law that lies between the levels and beyond them
    values, rewards, dones = rollout["law"] @ mean, rollout["rewards"], rollout["dones"]
    returns = np.zeros_like(values)
    returns[-1] = values[-1]
    for t in range(len(rewards) - 1, -1, -1):
        ahead = (1.0 - lam) * values[t + 1] + lam * returns[t + 1]
        for env in np.flatnonzero(dones[t]):
            ahead[env] = rollout["terminal_law"].get((t, env), np.zeros(32)) @ mean
        returns[t] = rewards[t] + GAMMA * ahead
    means = drawn.mean(-1)  # (draws, T, N) of the samples of one step
    np.testing.assert_allclose(means.mean(0), returns[:-1], atol=0.05)
    single = one_horizon_samples(rollout, 4, 2, lam, rng)
    assert means[:, 4, 2].std() < 0.5 * single.std() / np.sqrt(32)  # 32 independent samples would have 1.0


@pytest.mark.parametrize("lam", [0.5, 0.95])
@pytest.mark.parametrize("law", LAWS)
def test_the_law_of_a_discounted_sum_is_a_fixed_point(law: str, lam: float) -> None:
    """Critics that know the law of the return are told that very law: coverage within 2 points at every quantile."""
    rng, shape = np.random.default_rng(7), (50, 1_000)
    returns = LAWS[law].rvs(size=(100, 20_000), random_state=rng).T @ GAMMA ** np.arange(100)
    quantiles = np.quantile(returns, MIDPOINTS)
    rewards = LAWS[law].rvs(size=shape, random_state=rng).astype(np.float64)
    everywhere = np.broadcast_to(quantiles, (shape[0] + 1, shape[1], 32))
    targets = return_law_samples(rewards, everywhere, {}, np.zeros(shape, bool), GAMMA, lam, MIDPOINTS, rng)
    covered = np.searchsorted(np.sort(targets, None), quantiles) / targets.size
    np.testing.assert_allclose(covered, MIDPOINTS, atol=0.02)


@pytest.mark.parametrize("levels", [midpoint_levels(32), tail_levels(32, 0.05)], ids=["midpoint", "tail"])
def test_resampling_keeps_mean_and_spread_of_a_law_which_its_quantiles_alone_do_not(levels: tuple[float, ...]) -> None:
    quantiles = stats.norm(2.0, 3.0).ppf(np.asarray(levels))
    rng = np.random.default_rng(0)
    drawn = np.concatenate([resample(quantiles, levels, rng) for _ in range(2000)])
    assert drawn.mean() == pytest.approx(2.0, abs=0.03)
    assert drawn.std() == pytest.approx(3.0, rel=0.01)
    if levels == midpoint_levels(32):
        assert quantiles.std() < 0.985 * 3.0
