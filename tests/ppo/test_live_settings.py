"""L4: what callbacks set on a model takes effect from the next update on, or raises; K5b: scales go with weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.errors import CheckpointError, ConfigError, StateError
from tailguard.schedules import Schedule
from tests.agents import collected, logged, tiny_agent
from tests.environments import cartpole

PER_UPDATE = 32 * 4
Change = Callable[[DistributionalPPO], None]


class AfterRollout(BaseCallback):
    """Sets something at the end of the n-th rollout, as callbacks of SB3 do."""

    def __init__(self, change: Change, rollout: int = 2) -> None:
        super().__init__()
        self.change, self.rollout, self.seen = change, rollout, 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.seen += 1
        if self.seen == self.rollout:
            assert isinstance(self.model, DistributionalPPO)
            self.change(self.model)


def weights_of(agent: DistributionalPPO) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in agent.policy.named_parameters()}


def schedule_of_zero(agent: DistributionalPPO) -> None:
    agent.lr_schedule = lambda _: 0.0  # type: ignore[assignment]


def rate_of_zero(agent: DistributionalPPO) -> None:
    agent.learning_rate = 0.0
    agent._setup_lr_schedule()


@pytest.mark.parametrize("change", [schedule_of_zero, rate_of_zero])
def test_a_learning_rate_of_zero_moves_no_weight_and_no_prediction(change: Change) -> None:
    """Last layers of critics follow the return scale, so that what they predict stays."""
    agent = tiny_agent(learning_rate=1e-2)
    agent.learn(2 * PER_UPDATE)
    seen = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    before, quantiles = weights_of(agent), agent.predict_quantiles(seen)
    change(agent)
    agent.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    moved = [name for name, value in weights_of(agent).items() if not torch.equal(value, before[name])]
    assert all("head.output" in name for name in moved)
    np.testing.assert_allclose(agent.predict_quantiles(seen), quantiles, rtol=1e-4, atol=1e-3)
    assert logged(agent)["train/learning_rate"] == 0.0


NEW: dict[str, Any] = {
    "learning_rate": 5e-3,
    "n_epochs": 4,
    "gamma": 0.5,
    "gae_lambda": 0.2,
    "clip_range": 1e-4,
    "ent_coef": 0.3,
    "vf_coef": 5.0,
    "max_grad_norm": 1e-3,
    "target_kl": 1e-9,
    "normalize_advantage": False,
    "batch_size": 32,
    "clip_range_vf": 0.001,
    "n_steps": 16,
}


@pytest.mark.parametrize("name", NEW)
def test_what_is_set_acts_like_an_agent_that_was_loaded_with_it(name: str, tmp_path: Path) -> None:
    """Set after a rollout was collected, it acts in the update that follows: as if it had been set before."""
    agent = tiny_agent(learning_rate=1e-3)
    agent.learn(2 * PER_UPDATE)
    agent.save(tmp_path / "agent")
    plain, changed = (DistributionalPPO.load(tmp_path / "agent", cartpole(4, 3)) for _ in range(2))
    fresh = DistributionalPPO.load(tmp_path / "agent", cartpole(4, 3), **{name: NEW[name]})

    def change(model: DistributionalPPO) -> None:
        setattr(model, name, NEW[name])

    late = name != "n_steps"  # a rollout that is there keeps its size
    for each in (plain, fresh):
        each.learn(2 * PER_UPDATE)
    if late:
        changed.learn(2 * PER_UPDATE, AfterRollout(change, 1))
    else:
        change(changed)
        changed.learn(2 * PER_UPDATE)
    assert torch.equal(changed.learner.vector.flat, fresh.learner.vector.flat)
    assert not torch.equal(changed.learner.vector.flat, plain.learner.vector.flat)


def test_n_steps_takes_effect_with_the_next_rollout() -> None:
    sizes: list[int] = []

    class Sees(AfterRollout):
        def _on_rollout_end(self) -> None:
            sizes.append(self.model.rollout_buffer.n_steps)  # type: ignore[attr-defined]
            super()._on_rollout_end()

    agent = tiny_agent()
    agent.learn(3 * PER_UPDATE, Sees(lambda model: setattr(model, "n_steps", 64), 1))
    assert sizes == [32, 64]
    assert agent._n_updates == 2 * agent.n_epochs


@pytest.mark.parametrize("name", NEW)
def test_what_was_set_is_saved_loaded_and_resumed(name: str, tmp_path: Path) -> None:
    agent = tiny_agent(learning_rate=1e-3)
    agent.learn(PER_UPDATE)
    setattr(agent, name, NEW[name])
    agent.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    agent.checkpoint(tmp_path / "agent")
    twin = DistributionalPPO.resume(tmp_path / "agent", cartpole(4, 0))
    assert twin.config == agent.config
    assert DistributionalPPO.load(tmp_path / "agent").config == agent.config
    for each in (agent, twin):
        each.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    assert torch.equal(agent.learner.vector.flat, twin.learner.vector.flat)


def test_attributes_give_what_sb3_gives() -> None:
    agent = tiny_agent(learning_rate=1e-3, clip_range=Schedule(start=0.3, end=0.1), target_kl=0.5)
    assert (agent.n_epochs, agent.batch_size, agent.n_steps, agent.target_kl) == (2, 64, 32, 0.5)
    assert (agent.learning_rate, agent.lr_schedule(0.3), agent.clip_range(1.0)) == (1e-3, 1e-3, 0.3)
    assert agent.clip_range(0.0) == pytest.approx(0.1)
    assert agent.clip_range_vf is None
    agent.clip_range_vf = 0.2
    assert agent.clip_range_vf(0.5) == 0.2
    assert tiny_agent(batch_size=None).batch_size == 32
    assert {"n_steps", "gamma", "learning_rate", "lr_schedule"}.isdisjoint(vars(agent))  # one home: the config


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (FloatSchedule(3e-4), 3e-4),
        (ConstantSchedule(2e-4), 2e-4),
        (LinearSchedule(1e-3, 0.0, 1.0), Schedule(start=1e-3, end=0.0)),
        (np.float32(0.5), 0.5),
    ],
)
def test_schedules_of_sb3_are_kept_as_what_a_bundle_can_hold(given: Any, kept: Any, tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.lr_schedule = given
    assert agent.config.learning_rate == kept
    agent.save(tmp_path / "agent")
    assert DistributionalPPO.load(tmp_path / "agent").config.learning_rate == kept


def test_an_entropy_coefficient_that_is_set_decays_from_there() -> None:
    agent = tiny_agent(ent_coef=0.1, entropy={"decay_updates": 4, "ent_coef_min": 0.01})
    agent.learn(2 * PER_UPDATE)
    agent.ent_coef = 0.05
    agent.learn(PER_UPDATE, reset_num_timesteps=False)
    assert logged(agent)["train/ent_coef"] == pytest.approx(0.05 - 0.04 * 2 / 4)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("n_epochs", 0, "n_epochs"),
        ("gamma", 1.5, "gamma"),
        ("batch_size", 10_000, "batch_size=10000 is more"),
        ("n_steps", 1, "n_steps=1"),
        ("optimizer", "upgd", r"optimizer of an agent that has been built cannot be set.*load\(path, env, optimizer="),
        ("torch_threads", 7, "torch_threads of an agent"),
        ("use_sde", True, "not available"),
        ("seed", 7, "build another agent"),
        ("policy_kwargs", {"net_arch": [4]}, "build another agent"),
        ("clip_range_vf", lambda remaining: remaining, "Set a number"),
    ],
)
def test_what_cannot_be_set_raises_and_changes_nothing(name: str, value: Any, said: str) -> None:
    agent = tiny_agent()
    before = agent.config
    with pytest.raises(ConfigError, match=said):
        setattr(agent, name, value)
    assert agent.config == before


def test_a_whole_config_that_is_set_goes_through_the_same_checks() -> None:
    agent = tiny_agent()
    agent.config = agent.config.replace(ent_coef=0.5)
    assert agent.entropy.value == 0.5
    with pytest.raises(ConfigError, match="risk of an agent"):
        agent.config = agent.config.replace(risk={"mode": "nested", "weight": 0.5})


# loading and saving with SB3's keywords


def test_custom_objects_take_effect_or_raise(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent")
    given = {"learning_rate": 7e-4, "lr_schedule": lambda _: 7e-4, "clip_range": 0.05}
    loaded = DistributionalPPO.load(tmp_path / "agent", cartpole(4, 0), custom_objects=given)
    assert (loaded.learning_rate, loaded.clip_range(1.0)) == (7e-4, 0.05)
    loaded.learn(PER_UPDATE)
    assert logged(loaded)["train/learning_rate"] == 7e-4
    only = DistributionalPPO.load(tmp_path / "agent", custom_objects={"lr_schedule": lambda _: 1e-5})
    assert only.lr_schedule(1.0) == 1e-5
    spaces = {"observation_space": agent.observation_space, "action_space": agent.action_space}
    assert DistributionalPPO.load(tmp_path / "agent", custom_objects=spaces).action_space == agent.action_space
    with pytest.raises(ConfigError, match="no setting 'lr'"):
        DistributionalPPO.load(tmp_path / "agent", custom_objects={"lr": 0.1})
    with pytest.raises(CheckpointError, match=r"action_space=.* was given"):
        DistributionalPPO.load(tmp_path / "agent", custom_objects={"action_space": agent.observation_space})
    with pytest.raises(ConfigError, match="force_reset"):
        DistributionalPPO.load(tmp_path / "agent", force_reset=False)


def test_exclude_and_include_name_what_is_so_anyway_or_raise(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent", exclude=["env", "rollout_buffer"], include=["gamma", "policy"])
    assert DistributionalPPO.load(tmp_path / "agent").config == agent.config
    with pytest.raises(ConfigError, match=r"exclude=\['optimizer'\]"):
        agent.save(tmp_path / "other", exclude=["optimizer"])
    with pytest.raises(ConfigError, match=r"include=\['env'\]"):
        agent.save(tmp_path / "other", include=["env"])
    assert not (tmp_path / "other").exists()


# parameters


def test_parameters_carry_the_return_scale_so_that_values_are_the_same() -> None:
    one, two = tiny_agent(), tiny_agent(seed=5)
    one.learn(4 * PER_UPDATE)
    two.learn(PER_UPDATE)
    seen = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    two.set_parameters(one.get_parameters(include_optimizer=False), exact_match=False)
    np.testing.assert_array_equal(one.predict_quantiles(seen), two.predict_quantiles(seen))
    assert two.return_scale.state_dict() == one.return_scale.state_dict()


def test_parameters_from_a_saved_agent_carry_it_too_and_training_goes_on_alike(tmp_path: Path) -> None:
    risk = {"mode": "episode", "weight": 0.5, "horizon": 8}
    one, two = tiny_agent(risk=risk), tiny_agent(seed=5, risk=risk)
    one.learn(4 * PER_UPDATE)
    one.save(tmp_path / "one")
    two.set_parameters(tmp_path / "one")
    assert two.return_scale.state_dict() == one.return_scale.state_dict()
    assert two.risk.state_dict()["scale"] == one.risk.state_dict()["scale"]


def test_parameters_carry_the_statistics_of_observations() -> None:
    one, two = (tiny_agent(VecNormalize(cartpole(4, seed), norm_reward=False), seed=seed) for seed in (0, 5))
    one.learn(4 * PER_UPDATE)
    two.set_parameters(one.get_parameters())
    raw = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    np.testing.assert_array_equal(one.obs_stats.normalize(raw), two.obs_stats.normalize(raw))


def test_parameters_of_an_agent_that_saw_raw_observations_load_with_a_warning_where_they_are_normalized() -> None:
    one, two = tiny_agent(), tiny_agent(VecNormalize(cartpole(4, 5), norm_reward=False), seed=5)
    with pytest.warns(UserWarning, match="no obs_stats"):
        two.set_parameters(one.get_parameters())


def test_older_parameters_without_a_scale_load_with_a_warning() -> None:
    one, two = tiny_agent(), tiny_agent(seed=5)
    older = {name: state for name, state in one.get_parameters().items() if name not in ("return_scale", "risk")}
    with pytest.warns(UserWarning, match="no return_scale.*other units"):
        two.set_parameters(older)
    assert torch.equal(one.learner.vector.flat, two.learner.vector.flat)
    with pytest.raises(StateError, match="unknown"):
        two.set_parameters({**older, "return_scales": {}})


def test_the_discount_that_is_set_after_a_rollout_is_that_of_its_advantages() -> None:
    agent = collected(tiny_agent(gae_lambda=0.0))
    agent.gamma = 0.25
    agent.train()
    buffer = agent.rollout_buffer
    t, n = np.argwhere(~buffer.dones)[0]
    expected = buffer.rewards[t, n] + 0.25 * buffer.values[t + 1, n] - buffer.values[t, n]
    assert buffer.advantages[t, n] == pytest.approx(expected, rel=1e-5)
