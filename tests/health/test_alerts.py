"""Alerts as data: each fires when its figure is wrong for long enough, and on real agents that are sick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.errors import ConfigError
from tailguard.health import metrics
from tailguard.health.alerts import ALERTS, Alert, AlertMonitor, above
from tailguard.health.metrics import TRUNK_NAMES, declared
from tailguard.health.page import page
from tailguard.health.population_alerts import POPULATION_ALERTS
from tailguard.market.oracles import oracle_market
from tests.agents import logged, tiny_agent
from tests.environments import Countdown, cartpole, pendulum, vectorized

BY_NAME = {alert.name: alert for alert in (*ALERTS, *POPULATION_ALERTS)}
PROMISED = (
    "warn/twin_critics_gradient_imbalance",
    "warn/critic1_vanishing_gradients",
    "warn/critic2_vanishing_gradients",
    *(f"warn/{trunk}_{what}" for trunk in TRUNK_NAMES for what in ("trunk_vanishing_gradients", "lstm_death")),
    "warn/ev_reserve_all_masked",
    "warn/empty_epoch",
    "warn/cvar_tail_samples_low",
)
"""Names that docs/guarantees.md is about."""


def silent_logger() -> Logger:
    return Logger(None, [])


def wrong_value(alert: Alert) -> float:
    rule = alert.fires
    return rule.high + 1.0 if np.isfinite(rule.high) else rule.low - 1.0


def right_value(alert: Alert) -> float:
    rule = alert.fires
    if np.isfinite(rule.low) and np.isfinite(rule.high):
        return (rule.low + rule.high) / 2.0
    return rule.low + 1.0 if np.isfinite(rule.low) else rule.high - 1.0


def test_every_promised_alert_is_there_and_every_alert_says_what_and_what_to_do() -> None:
    assert set(PROMISED) <= set(BY_NAME)
    assert len(BY_NAME) == len(ALERTS) + len(POPULATION_ALERTS)
    for alert in BY_NAME.values():
        text = alert.sentence(0.5, "update 3")
        assert text.startswith(f"{alert.name}: {alert.metric.name} = 0.5, since update 3. ")
        assert len(alert.meaning) > 20
        assert text.endswith(alert.advice)
        assert len(alert.advice) > 20


@pytest.mark.parametrize("alert", BY_NAME.values(), ids=lambda alert: alert.name)
def test_an_alert_begins_after_its_time_and_ends_with_its_cause(alert: Alert) -> None:
    monitor, logger = AlertMonitor((alert,)), silent_logger()
    heard: list[str] = []
    monitor.listeners.append(lambda begun, value: heard.append(begun.name))
    for n in range(1, alert.for_updates + 3):
        firing = monitor.check({alert.metric.name: wrong_value(alert)}, logger)
        assert (alert in firing) == (n >= alert.for_updates)
    assert heard == [alert.name]  # said once
    assert monitor.since[alert.name] == 1
    assert monitor.check({alert.metric.name: right_value(alert)}, logger) == []
    assert monitor.check({}, logger) == []  # a figure that is not there is not wrong


def test_streaks_and_trends_survive_saving() -> None:
    logger, first = silent_logger(), AlertMonitor()
    for ev in (0.9, 0.9, 0.8):
        first.check({metrics.EXPLAINED_VARIANCE.name: ev, metrics.RETURN_STD.name: 1.0}, logger)
    second = AlertMonitor()
    second.load_state_dict(first.state_dict())
    for monitor in (first, second):
        for _ in range(20):
            monitor.check({metrics.EXPLAINED_VARIANCE.name: 0.0, metrics.RETURN_STD.name: 1.0}, logger)
    assert first.state_dict() == second.state_dict()
    assert first.streaks["warn/explained_variance_collapse"] >= 5


def test_own_alerts_are_checked_like_ours_and_named_like_ours() -> None:
    agent = tiny_agent()
    agent.alerts.add(Alert("warn/anything", metrics.ENTROPY, above(-1e9), "Always.", "Nothing."))
    agent.learn(128)
    assert logged(agent)["warn/anything"] == 1.0
    with pytest.raises(ConfigError, match="already an alert"):
        agent.alerts.add(BY_NAME["warn/kl_blow_up"])
    with pytest.raises(ConfigError, match="begins with warn/"):
        agent.alerts.add(Alert("mine", metrics.ENTROPY, above(0.0), "", ""))


def test_the_page_is_the_declarations() -> None:
    assert (Path(__file__).parents[2] / "docs" / "metrics.md").read_text() == page(), (
        "run: python -m tailguard.health.page > docs/metrics.md"
    )


def test_there_are_tens_of_metrics_not_hundreds() -> None:
    assert 30 <= len(declared()) <= 100
    assert len({metric.name for metric in declared()}) == len(declared())


def test_everything_logged_is_declared() -> None:
    agent = tiny_agent()
    agent.learn(128)
    names = {metric.name for metric in declared()} | {alert.name for alert in ALERTS}
    loose = [
        name
        for name in logged(agent)
        if not name.startswith(("time/", "rollout/", "lstm/actor_", "lstm/critic_")) and name not in names
    ]
    assert loose == []


# on real agents


class Counter(gym.Env[Any, Any]):
    """An observation without a level: it counts for ever, faster and faster."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n = 1.0
        return np.array([self.n]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n *= 1.1
        return np.array([self.n]), float(self.np_random.normal()), False, False, {}


class GrowingReward(Counter):
    """Rewards that grow by a factor with every step."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n *= 1.05
        return np.zeros(1, np.float32), self.n * float(self.np_random.normal()), False, False, {}


class Blind(Counter):
    """Nothing to see."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), float(self.np_random.normal()), False, False, {}


def normalized(env: VecEnv) -> VecEnv:
    return VecNormalize(env, norm_obs=True, norm_reward=False)


def silence_memory(agent: DistributionalPPO) -> None:
    with torch.no_grad():
        for name, parameter in agent.policy.named_parameters():
            if ".memory.bias" in name:
                parameter.zero_()


def deaf(agent: DistributionalPPO) -> None:
    """The head no longer looks at its features."""
    with torch.no_grad():
        for module in agent.policy.action_head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.zero_()


def decided(agent: DistributionalPPO) -> None:
    """One choice has all the probability."""
    deaf(agent)
    with torch.no_grad():
        agent.policy.action_head.logits.bias.copy_(torch.tensor([30.0, -30.0]))  # type: ignore[union-attr,operator]


def shout(agent: DistributionalPPO) -> None:
    """The critics' last layers are far too loud: what they say has nothing to do with the returns."""
    anything = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for critic in agent.policy.critic_list:
            for parameter in critic.head.parameters():
                parameter.normal_(0.0, 50.0, generator=anything)


class Shouting(BaseCallback):
    """From some update on something overwrites the critics before every rollout."""

    model: DistributionalPPO

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self.model.alerts.updates >= self.first:
            shout(self.model)


def trades_against_itself() -> VecEnv:
    market = oracle_market("signal", cost_bps=60.0)
    return oracle_env(market, 16, 0, n_bars=3_000)


SICK: dict[str, dict[str, Any]] = {
    "warn/exploration_collapse": {"env": lambda: pendulum(4, 0), "policy_kwargs": {"log_std_init": -6.0}},
    "warn/action_saturation": {"env": lambda: pendulum(4, 0), "policy_kwargs": {"log_std_init": 6.0}},
    "warn/buy_and_hold_collapse": {
        "env": lambda: pendulum(4, 0),
        "policy_kwargs": {"log_std_init": -12.0},
        "learning_rate": 1e-10,
        "prepare": deaf,
    },
    "warn/kl_blow_up": {"env": lambda: pendulum(4, 0), "learning_rate": 0.05, "n_epochs": 10, "clip_range": 10.0},
    "warn/clip_fraction_high": {
        "env": lambda: pendulum(4, 0),
        "learning_rate": 0.1,
        "n_epochs": 10,
        "clip_range": 1e-3,
    },
    "warn/learning_rate_floor": {"env": lambda: cartpole(4, 0), "learning_rate": 1e-12},
    "warn/normalizer_drift": {"env": lambda: normalized(vectorized(Counter, 4, 0))},
    "warn/return_scale_jump": {
        "env": lambda: vectorized(GrowingReward, 4, 0),
        "return_scale": {"max_change": 1e6},
    },
    "warn/lstm_death": {"env": lambda: vectorized(Blind, 4, 0), "learning_rate": 1e-12, "prepare": silence_memory},
    "warn/vgs_pinned": {"env": lambda: cartpole(4, 0), "vgs": {"alpha": 1e9, "warmup_steps": 1}},
    "warn/entropy_collapse": {"env": lambda: cartpole(4, 0), "learning_rate": 1e-10, "prepare": decided},
}


@pytest.mark.parametrize("name", SICK)
def test_it_fires_on_a_real_agent_that_is_sick(name: str) -> None:
    settings = dict(SICK[name])
    env, prepare = settings.pop("env")(), settings.pop("prepare", lambda agent: None)
    agent = tiny_agent(env, **settings)
    prepare(agent)
    heard: list[str] = []
    agent.alerts.listeners.append(lambda alert, value: heard.append(alert.name))
    agent.learn((BY_NAME[name].for_updates + 3) * 32 * 4)
    assert name in heard


@pytest.mark.parametrize(
    ("first", "rate", "raised"),
    [
        (0, 1e-6, {"warn/explained_variance_low", "warn/quantile_crossing"}),
        (30, 5e-3, {"warn/explained_variance_collapse"}),
    ],
    ids=["from_the_start", "after_learning"],
)
def test_critics_that_talk_nonsense_are_seen(first: int, rate: float, raised: set[str]) -> None:
    agent = tiny_agent(vectorized(Countdown, 4, 0), learning_rate=rate, n_epochs=4, gamma=0.95, gae_lambda=1.0)
    heard: list[str] = []
    agent.alerts.listeners.append(lambda alert, value: heard.append(alert.name))
    agent.learn((first + 25) * 128, Shouting(first))
    assert raised <= set(heard)


@pytest.mark.slow
def test_a_limit_out_of_reach_is_said_after_many_updates() -> None:
    limited = {"mode": "episode", "alpha": 0.25, "cvar_limit": 1e6}
    agent = tiny_agent(cartpole(4, 0), risk=limited)
    agent.learn(BY_NAME["warn/cvar_limit_violated"].for_updates * 128)
    assert logged(agent)["warn/cvar_limit_violated"] == 1.0


@pytest.mark.parametrize("env", [lambda: cartpole(4, 0), lambda: pendulum(4, 0)], ids=["cartpole", "pendulum"])
def test_a_healthy_agent_raises_none(env: Any) -> None:
    agent = tiny_agent(env())
    heard: list[str] = []
    agent.alerts.listeners.append(lambda alert, value: heard.append(alert.name))
    agent.learn(15 * 32 * 4)  # so small a critic is not calibrated, and is told so after 20 updates
    assert heard == []


def test_costs_that_eat_a_real_profit_are_seen() -> None:
    agent = tiny_agent(trades_against_itself(), n_steps=64)
    agent.learn(64 * 16)
    assert logged(agent)["market/turnover"] > 0.0
    agent.trading.note(8, np.full(16, 1e-4), [{"equity": 1.0, "costs": 9.9e-4, "turnover": 1.0}] * 16)
    agent.trading.note(16, np.full(16, 1.1e-4), [{"equity": 1.0, "costs": 9.9e-4, "turnover": 1.0}] * 16)
    paid, kept = 2 * 9.9e-4, 1e-4 + 1.1e-4
    assert agent.trading.figures()[metrics.COST_SHARE] == pytest.approx(paid / (paid + kept))
    assert agent.trading.figures() == {}
