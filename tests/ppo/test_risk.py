"""F3-F5: risk acts on the policy through a stream of its own; limit, dual variable, alerts, calibration figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tailguard.errors import ConfigError
from tailguard.losses.risk import empirical_cvar, midpoint_levels
from tailguard.ppo.risk import EpisodeRisk, RiskConfig, nested_advantages
from tailguard.ppo.watch import calibration_figures
from tailguard.rollout.periods import risk_rewards, walk_periods
from tests.agents import collected, gradient_of, logged, tiny_agent
from tests.environments import ConstantReward, NoiseChain, Sizing, cartpole, vectorized

EPISODE = {"mode": "episode", "alpha": 0.25, "weight": 0.5}


def sizing_agent(length: int = 4, n_envs: int = 8, **settings: Any) -> DistributionalPPO:
    return tiny_agent(Sizing(n_envs, 0, length=length), **{"risk": EPISODE, **settings})


# what the default leaves alone


def test_without_risk_the_policy_has_no_risk_value_and_the_advantage_is_that_of_the_return() -> None:
    agent = collected(tiny_agent())
    assert agent.policy.risk_value is None
    assert agent.risk.state_dict() == {}
    buffer = agent.rollout_buffer
    assert agent.risk.advantages(buffer, np.zeros((1,))) is buffer.advantages


# configuration


@pytest.mark.parametrize(
    ("risk", "says"),
    [
        ({"weight": 0.5}, "mode"),
        ({"cvar_limit": -0.1}, "mode"),
        ({"mode": "episode"}, "either weight or cvar_limit"),
        ({"mode": "episode", "weight": 0.5, "cvar_limit": -0.1}, "either weight or cvar_limit"),
        ({"mode": "nested", "cvar_limit": -0.1}, "period"),
        ({"mode": "nested", "weight": 1.5}, "weight"),
        ({"mode": "episode", "weight": 1.0, "alpha": 0.0}, "alpha"),
        ({"mode": "episode", "cvar_limit": float("nan")}, "cvar_limit"),
        ({"mode": "static", "weight": 1.0}, "mode"),
        ({"mode": "episode", "wieght": 1.0}, "weight"),
    ],
)
def test_a_risk_config_that_says_nothing_or_two_things_is_refused(risk: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tiny_agent(risk=risk)


def test_a_policy_that_fears_risk_starts_with_less_exploration_unless_told() -> None:
    narrow, told, default = sizing_agent(), sizing_agent(policy_kwargs={"log_std_init": -0.5}), tiny_agent()
    assert narrow.policy.action_head.log_std.tolist() == [-2.0]
    assert told.policy.action_head.log_std.tolist() == [-0.5]
    assert default.policy_config.log_std_init == 0.0


def test_a_ceiling_on_exploration_falls_with_progress() -> None:
    agent = sizing_agent(policy_kwargs={"log_std_init": -1.0, "log_std_end": -3.0})
    agent.learn(2 * 256)
    assert agent.policy.action_head.log_std.max() <= -3.0
    assert logged(agent)["train/first_log_ratio_max_abs"] < 1e-5  # it moves between updates only


# the episode's risk


def test_the_buffer_holds_the_streams_advantages_and_the_policy_climbs_the_mixture() -> None:
    agent = collected(sizing_agent(risk={**EPISODE, "weight": 0.3, "gae_lambda": 1.0}))
    buffer = agent.rollout_buffer
    periods = walk_periods(buffer.rewards, buffer.terminated, buffer.truncated, np.zeros(8), np.zeros(8), None)
    assert isinstance(agent.risk, EpisodeRisk)
    stream = risk_rewards(buffer.rewards, periods.so_far[:-1], agent.risk.threshold, 0.25)
    to_go = stream.reshape(8, 4, 8)[:, ::-1].cumsum(1)[:, ::-1].reshape(32, 8)  # eight periods of four steps
    np.testing.assert_allclose(buffer.risk_returns, to_go, atol=1e-9)  # lambda 1: the stream itself, no value in it
    mixed = agent.risk.advantages(buffer, np.zeros(1))
    np.testing.assert_allclose(mixed, 0.7 * buffer.advantages + 0.3 * buffer.risk_advantages)


def test_the_threshold_is_the_alpha_quantile_of_recent_periods_and_old_ones_are_forgotten() -> None:
    agent = sizing_agent(risk={**EPISODE, "window": 100})
    risk = agent.risk
    assert isinstance(risk, EpisodeRisk)
    agent.learn(32 * 8)
    assert len(risk.recent) == 64
    agent.learn(32 * 8, reset_num_timesteps=False)
    assert len(risk.recent) == 100
    share = (risk.recent[:, 0] <= risk.threshold).mean()
    assert share == pytest.approx(0.25, abs=0.011)


def test_at_alpha_one_pure_cvar_is_the_mean_of_the_period() -> None:
    risk = {"mode": "episode", "alpha": 1.0, "weight": 1.0, "gae_lambda": 1.0}
    agent = collected(sizing_agent(risk=risk, gae_lambda=1.0, gamma=1.0))
    buffer = agent.rollout_buffer
    np.testing.assert_allclose(buffer.risk_returns, buffer.returns, atol=1e-6)


def test_a_truncation_inside_a_horizon_bootstraps_and_one_that_ends_the_episode_does_not() -> None:
    env = vectorized(lambda: ConstantReward(limit=5, reward=-1.0), 2)  # truncated every 5 steps
    whole = collected(tiny_agent(env, risk={**EPISODE, "gae_lambda": 1.0}))
    assert isinstance(whole.risk, EpisodeRisk)
    assert set(whole.risk.recent[:, 0]) == {-5.0}
    np.testing.assert_allclose(whole.rollout_buffer.risk_returns[:5, 0], np.zeros(5), atol=1e-9)  # nu = X: no shortfall
    env = vectorized(lambda: ConstantReward(limit=5, reward=-1.0), 2)
    cut = collected(tiny_agent(env, risk={**EPISODE, "horizon": 3, "gae_lambda": 1.0}))
    assert isinstance(cut.risk, EpisodeRisk)
    assert set(cut.risk.recent[:, 0]) == {-3.0}
    buffer = cut.rollout_buffer
    with torch.no_grad():
        periods = walk_periods(buffer.rewards, buffer.terminated, buffer.truncated, np.zeros(2), np.zeros(2), 3)
        after = cut.risk.values_at_cuts(cut.policy, buffer, periods)
    assert periods.cut[4].all()
    np.testing.assert_allclose(buffer.risk_returns[4], after[:2], atol=1e-6)  # the value of the terminal observation


def test_no_gradient_of_risk_reaches_the_critics_and_the_risk_value_learns() -> None:
    """F3: weights and limits change what the actor and the risk value learn, never the critics."""
    gradients = []
    for risk in ({"mode": "none"}, EPISODE, {**EPISODE, "weight": 1.0}, {"mode": "nested", "weight": 1.0}):
        agent = collected(sizing_agent(risk=risk, policy_kwargs={"log_std_init": -1.0}))
        gradient_of(agent, agent.sequences())
        named = dict(agent.policy.named_parameters())
        gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            if name.startswith("critics."):
                torch.testing.assert_close(other[name], gradient, atol=0, rtol=0)
    assert any(not torch.equal(gradients[0][n], gradients[2][n]) for n in gradients[0] if n.startswith("actor."))
    learned = [name for name, gradient in gradients[1].items() if name.startswith("risk_value.") and gradient.any()]
    assert len(learned) == 6


def test_every_parameter_moves_in_one_update_with_risk_on() -> None:
    agent = collected(tiny_agent(cartpole(8, 0), risk=EPISODE, n_steps=64))
    assert len(agent.risk.state_dict()["recent"])  # some episode was over, so there is a stream to learn from
    before = {name: p.detach().clone() for name, p in agent.policy.named_parameters()}
    agent.train()
    assert [name for name, p in agent.policy.named_parameters() if torch.equal(p, before[name])] == []


def test_the_risk_values_unit_moves_without_moving_a_decoded_value() -> None:
    agent = collected(sizing_agent())
    risk, buffer = agent.risk, agent.rollout_buffer
    assert isinstance(risk, EpisodeRisk)
    period = np.concatenate([buffer.period, buffer.period[-1:]])
    before = risk.values(agent.policy, buffer, period)
    assert risk.follow_scale(agent.policy, buffer)
    np.testing.assert_allclose(risk.values(agent.policy, buffer, period), before, rtol=1e-5, atol=1e-6)


def test_before_a_period_is_over_there_is_no_risk_term() -> None:
    agent = collected(sizing_agent(length=1_000, risk={**EPISODE, "weight": 0.25}))
    buffer = agent.rollout_buffer
    np.testing.assert_array_equal(agent.risk.advantages(buffer, np.zeros(1)), 0.75 * buffer.advantages)
    agent.train()
    assert logged(agent)["risk/tail_samples"] == 0.0


# the limit


def limited(limit: float, **settings: Any) -> EpisodeRisk:
    risk = EpisodeRisk(RiskConfig(mode="episode", alpha=0.1, cvar_limit=limit, **settings))
    returns = np.random.default_rng(0).normal(size=500)
    risk.recent, risk.fresh = np.stack([returns, np.ones(500)], -1), 1.0
    return risk


def test_the_dual_climbs_while_the_limit_is_violated_falls_while_it_holds_and_stays_within_its_cap() -> None:
    tail = empirical_cvar(limited(0.0).recent[:, 0], 0.1)
    violated, held = limited(tail + 0.5), limited(tail - 0.5)
    figures = violated.update(0.5)
    held.update(0.5)
    assert violated.dual > 1.0 > held.dual
    named = {metric.name: value for metric, value in figures.items()}
    assert named["risk/violation"] == pytest.approx(0.5)
    assert named["risk/period_cvar"] == pytest.approx(tail)
    assert named["risk/dual"] == 1.0  # the price this update used
    capped = limited(tail + 5.0, dual_max=1.5, dual_learning_rate=10.0)
    for _ in range(5):
        capped.update(0.5)
    assert capped.dual == 1.5


def test_the_dual_stands_still_at_first_and_moves_with_the_share_of_fresh_periods() -> None:
    early, stale, fresh = limited(0.0), limited(0.0), limited(0.0)
    stale.fresh = 0.1
    early.update(0.05)
    stale.update(0.5)
    fresh.update(0.5)
    assert early.dual == 1.0
    assert np.log(stale.dual) == pytest.approx(np.log(fresh.dual) / 3)  # a tenth of the window, against three at most


def test_under_a_limit_the_policy_climbs_return_plus_price_times_risk_rescaled() -> None:
    agent = collected(sizing_agent(risk={"mode": "episode", "alpha": 0.25, "cvar_limit": 0.0, "dual_init": 3.0}))
    buffer = agent.rollout_buffer
    expected = (buffer.advantages + 3.0 * buffer.risk_advantages) / 4.0
    np.testing.assert_allclose(agent.risk.advantages(buffer, np.zeros(1)), expected)


def test_dual_periods_and_scale_are_saved(tmp_path: Path) -> None:
    risk = {"mode": "episode", "alpha": 0.25, "cvar_limit": 0.3, "dual_delay": 0.0}
    agent = sizing_agent(risk=risk)
    agent.learn(3 * 256)
    agent.save(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", env=Sizing(8, 1, length=4))
    assert isinstance(twin.risk, EpisodeRisk)
    assert twin.risk.dual == agent.risk.dual != 1.0  # type: ignore[attr-defined]
    assert state_digest(twin.risk.state_dict()) == state_digest(agent.risk.state_dict())
    for each in (agent, twin):
        each.set_env(Sizing(8, 2, length=4))
        each.learn(2 * 256, reset_num_timesteps=False)
    assert state_digest(twin.risk.state_dict()) == state_digest(agent.risk.state_dict())


def test_a_limit_given_at_load_beats_the_saved_one(tmp_path: Path) -> None:
    agent = sizing_agent(risk={"mode": "episode", "alpha": 0.25, "cvar_limit": 0.3})
    agent.learn(2 * 256)
    agent.save(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", env=Sizing(8, 1, length=4), risk={"cvar_limit": -0.2})
    assert twin.risk.config.cvar_limit == -0.2
    assert twin.risk.state_dict()["dual"] == agent.risk.state_dict()["dual"]


# nested risk


def test_nested_advantages_are_zero_on_average_under_a_calibrated_law_and_fear_its_tail() -> None:
    levels = midpoint_levels(51)
    law = np.broadcast_to(stats.norm.ppf(np.asarray(levels)), (1, 1, 51))
    outcomes = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000).reshape(1, 1, -1)
    for weight in (0.0, 0.5, 1.0):
        assert nested_advantages(outcomes, law, levels, 0.1, weight)[0, 0] == pytest.approx(0.0, abs=2e-3)
    bad, worse = (float(nested_advantages(np.full((1, 1, 1), z), law, levels, 0.1, 1.0)[0, 0]) for z in (-2.0, -3.0))
    assert bad - worse == pytest.approx(1.0 / 0.1)  # slope 1 / alpha in the tail
    above = [float(nested_advantages(np.full((1, 1, 1), z), law, levels, 0.1, 1.0)[0, 0]) for z in (0.0, 1.0)]
    assert above[0] == pytest.approx(above[1])  # and flat above the threshold


def test_nested_risk_at_alpha_one_or_weight_zero_is_the_mean() -> None:
    rng = np.random.default_rng(0)
    law, target = np.sort(rng.normal(size=(3, 2, 8)), -1), rng.normal(size=(3, 2, 5))
    expected = target.mean(-1) - law.mean(-1)
    for alpha, weight in ((1.0, 1.0), (0.1, 0.0)):
        np.testing.assert_allclose(nested_advantages(target, law, midpoint_levels(8), alpha, weight), expected)


# watching


def test_calibration_and_tail_figures_are_logged() -> None:
    agent = sizing_agent()
    agent.learn(2 * 256)
    figures = logged(agent)
    for name in ("coverage_05", "coverage_25", "coverage_50", "coverage_75", "coverage_95"):
        assert 0.0 <= figures[f"risk/{name}"] <= 1.0
    assert {"risk/predicted_cvar", "risk/empirical_cvar", "risk/period_cvar", "risk/threshold"} <= set(figures)
    assert figures["risk/tail_samples"] == 0.25 * 128
    assert "risk/dual" not in figures


@pytest.mark.parametrize("grid", ["midpoint", "tail"])
def test_a_law_whose_quantiles_cross_is_read_in_order(grid: str) -> None:
    agent = collected(tiny_agent(critic={"n_quantiles": 8, "grid": grid}))
    buffer, scale = agent.rollout_buffer, agent.return_scale.snapshot
    buffer.law = np.sort(buffer.law, -1)
    buffer.terminal_law = {place: np.sort(law) for place, law in buffer.terminal_law.items()}
    expected = calibration_figures(buffer, agent.config, scale)
    shuffled = np.random.default_rng(0).permutation(8)
    buffer.law = buffer.law[..., shuffled]
    buffer.terminal_law = {place: law[shuffled] for place, law in buffer.terminal_law.items()}
    assert calibration_figures(buffer, agent.config, scale) == pytest.approx(dict(expected))


def test_coverage_does_not_touch_the_random_streams() -> None:
    agent = collected(tiny_agent())

    def streams() -> str:
        shared = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1]}  # noqa: NPY002
        return state_digest({**shared, "own": agent.randomness.state_dict()})

    before = streams()
    assert calibration_figures(agent.rollout_buffer, agent.config, agent.return_scale.snapshot)
    assert streams() == before
    agent.sequences()  # which draws: the digest would have told
    assert streams() != before


def alerts_of(agent: DistributionalPPO, n_updates: int) -> set[str]:
    agent.learn(n_updates * agent.config.n_steps * agent.n_envs, log_interval=10**6)
    return {name for name in logged(agent) if name.startswith("warn/")}


@pytest.mark.parametrize(("alpha", "fires"), [(0.01, True), (0.25, False)])
def test_too_few_periods_in_the_tail_raise_an_alert(alpha: float, fires: bool) -> None:
    agent = sizing_agent(risk={**EPISODE, "alpha": alpha}, n_epochs=1)
    assert ("warn/cvar_tail_samples_low" in alerts_of(agent, 10)) == fires


@pytest.mark.parametrize("fires", [True, False])
def test_quantiles_that_do_not_fit_what_happens_raise_an_alert(fires: bool) -> None:
    """A critic that cannot learn and predicts far too narrow a law, and one as it comes."""
    agent = tiny_agent(vectorized(NoiseChain, 8), gamma=0.5, return_scale={"enabled": False}, n_epochs=1)
    if fires:
        for critic in agent.policy.critic_list:
            with torch.no_grad():
                critic.head.last_layer.bias.mul_(0.05)
            for parameter in critic.parameters():
                parameter.register_hook(torch.zeros_like)
    assert ("warn/quantiles_miscalibrated" in alerts_of(agent, 20)) == fires
