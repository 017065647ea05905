"""I1, I3: what the adversary does to a training, what it saves, and that nobody costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.adversary import Adversary, AdversaryConfig, Scene, observation_bounds
from tailguard.adversary.training import Attacker
from tailguard.env import oracle_env
from tailguard.errors import ConfigError
from tailguard.losses import masked_mean
from tailguard.market.oracles import oracle_market
from tailguard.normalization import ObservationStatistics
from tailguard.population.space import HyperparamConfig, check_space, with_values
from tailguard.ppo.update import actor_loss
from tests.agents import collected, logged, tiny_agent
from tests.environments import pendulum

SETTINGS = {"epsilon": 0.2, "ramp": 0.0}


def attacker_of(agent: DistributionalPPO) -> Attacker:
    assert isinstance(agent.adversary, Attacker)
    return agent.adversary


def prepared(**adversary: Any) -> DistributionalPPO:
    """An agent with a rollout in its buffer, about to train; its actions depend on what it sees."""
    agent = collected(tiny_agent(pendulum(4, 0), adversary={**SETTINGS, **adversary}))
    with torch.no_grad():
        for weight in agent.policy.action_head.mean.parameters():
            weight.mul_(100.0)
    agent.adversary.face(agent.observation_space, agent.obs_stats)
    return agent


def scene_in(agent: DistributionalPPO) -> Scene:
    batch = agent.sequences()
    return Scene(batch.observations, batch.layout(), batch.actor_state, batch.valid)


def test_the_default_is_nobody_with_nothing_to_save() -> None:
    agent = tiny_agent()
    assert type(agent.adversary) is Adversary
    assert "adversary" not in agent.parts()
    assert agent.config.adversary is None
    scene = scene_in(collected(agent))
    shown, clean = agent.adversary.perturb(agent.policy, scene)
    loss = torch.zeros(())
    assert shown is scene.observations
    assert clean is scene.valid
    assert agent.adversary.harden(loss, agent.policy, scene, torch.zeros(())) is loss


def test_the_penalty_is_the_weight_times_the_mean_divergence_and_reaches_the_actor_alone() -> None:
    agent = prepared(weight=3.0)
    plain = prepared(weight=0.0)
    batch, schedules = agent.sequences(), agent.schedules()
    hard, easy = (actor_loss(each.learner, batch, schedules)[0] for each in (agent, plain))
    reached = attacker_of(agent).divergence
    assert reached > 1e-4
    torch.testing.assert_close(hard.detach() - easy.detach(), torch.tensor(3.0 * reached))
    (hard - easy.detach()).backward()
    moved = {name for name, p in agent.policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {n for n, _ in agent.policy.named_parameters() if n.startswith(("actor", "action_head"))}


@pytest.mark.parametrize("detached", [True, False])
def test_the_penalty_moves_the_spread_only_when_it_is_not_detached(detached: bool) -> None:
    agent = prepared(detach_std=detached)
    scene = scene_in(agent)
    parameters = scene.parameters(agent.policy, scene.observations)
    agent.adversary.harden(torch.zeros(()), agent.policy, scene, parameters).backward()
    gradient = agent.policy.action_head.log_std.grad
    moved = gradient is not None and bool(gradient.any())
    assert moved is not detached
    if not detached:
        assert gradient is not None
        assert (gradient < 0).all()  # more noise would meet the penalty


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_mixed_mode_attacks_its_share_of_the_sequences_and_leaves_the_rest_as_it_was(ratio: float) -> None:
    agent = prepared(mode="mixed", ratio=ratio)
    scene = scene_in(agent)
    shown, clean = agent.adversary.perturb(agent.policy, scene)
    touched = (shown != scene.observations).any(-1).any(0)
    assert int(touched.sum()) == round(ratio * scene.valid.shape[1])
    assert torch.equal(clean, scene.valid & ~touched)
    assert float((shown - scene.observations).abs().max()) <= 0.2 + 1e-6


def test_in_mixed_mode_clean_and_attacked_samples_weigh_the_same() -> None:
    agent = prepared(mode="mixed", ratio=0.5)
    batch, state = agent.sequences(), attacker_of(agent).state_dict()
    policy_loss = actor_loss(agent.learner, batch, agent.schedules())[1][0].detach()
    attacker_of(agent).load_state_dict(state)
    shown, _ = agent.adversary.perturb(agent.policy, scene_in(agent))
    parameters = agent.policy.action_parameters(shown, batch.layout(), batch.actor_state)
    ratio = (agent.policy.action_head.log_prob(parameters, batch.actions) - batch.log_probs).exp()
    each = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    torch.testing.assert_close(policy_loss, masked_mean(each, batch.valid).detach())


@pytest.mark.parametrize("mode", ["regulariser", "mixed"])
def test_the_first_log_ratio_stays_zero_and_the_live_memory_is_not_advanced(mode: str) -> None:
    agent = collected(tiny_agent(pendulum(4, 0), adversary={**SETTINGS, "mode": mode}))
    assert agent.live is not None
    before = [part.clone() for part in agent.live.actor_state]
    agent.train()
    assert logged(agent)["train/first_log_ratio_max_abs"] <= 1e-5
    assert logged(agent)["adversary/epsilon"] == 0.2
    assert logged(agent)["adversary/divergence"] > 0.0
    assert all(torch.equal(now, then) for now, then in zip(agent.live.actor_state, before, strict=True))


def test_epsilon_follows_the_updates_of_learn_does_not_compound_and_goes_on_after_loading(tmp_path: Path) -> None:
    rollout = 32 * 4
    agent = tiny_agent(adversary={"epsilon": 0.4, "ramp": 0.5})
    sizes: list[float] = []
    agent.learn(4 * rollout + 1, callback=lambda *_: sizes.append(attacker_of(agent).epsilon) or True)
    assert sizes[:: rollout // 4] == [0.2, 0.4, 0.4, 0.4, 0.4]  # 4 whole updates: half of them rise
    agent.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", env=agent.env)
    assert attacker_of(loaded).state_dict()["n_done"] == 5
    loaded.learn(7 * rollout, reset_num_timesteps=False)  # 5 done + 7 to come: 6 of 12 rise
    assert attacker_of(loaded).n_updates == 12
    assert attacker_of(loaded).n_done == 12
    loaded.learn(2 * rollout, callback=lambda *_: sizes.append(attacker_of(loaded).epsilon) or True)
    assert sizes[-1] == 0.4
    assert attacker_of(loaded).n_done == 2


def test_two_agents_with_one_seed_train_to_the_same_bits() -> None:
    def trained() -> torch.Tensor:
        return tiny_agent(adversary=SETTINGS).learn(256).learner.vector.flat.detach()

    assert torch.equal(trained(), trained())


def test_a_market_lets_prices_be_attacked_and_spares_position_and_clock() -> None:
    env = oracle_env(oracle_market("crash"), 4, n_bars=2_000)
    assert env.layout.names[-2:] == ("time_left", "period_return")
    agent = collected(tiny_agent(env, adversary=SETTINGS))
    sizes = attacker_of(agent).sizes
    seen = len(env.feature_names) * len(env.bars.symbols)
    assert sizes[:seen].all()
    assert not sizes[seen:].any()
    chosen = collected(tiny_agent(oracle_env(oracle_market("crash"), 4, n_bars=2_000), adversary={"spare": (0,)}))
    assert attacker_of(chosen).sizes[0] == 0.0


def test_bounds_are_those_of_what_the_policy_sees() -> None:
    env = pendulum(2, 0)
    plain = observation_bounds(env.observation_space, ObservationStatistics(None))
    assert plain is not None
    np.testing.assert_array_equal(plain, [[-1.0, -1.0], [1.0, 1.0]])
    normalizer = VecNormalize(env, norm_reward=False)
    normalizer.obs_rms.mean[:], normalizer.obs_rms.var[:] = 0.5, 0.01
    seen = observation_bounds(env.observation_space, ObservationStatistics(normalizer))
    assert seen is not None
    np.testing.assert_allclose(seen, [[-10.0, -10.0], [5.0, 5.0]], rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scales": (1.0, 1.0, 1.0)}, "3 scales for observations of 2 features"),
        ({"spare": (7,)}, "no column 7"),
        ({"scales": (0.0, 1.0), "spare": (1,)}, "leave no feature"),
        ({"epsylon": 0.1}, "epsilon"),
    ],
)
def test_settings_that_fit_nothing_are_refused_with_what_to_do(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_agent(adversary=settings)


def test_a_population_can_vary_epsilon_ratio_and_weight() -> None:
    config = tiny_agent(adversary=SETTINGS).config
    space = [
        HyperparamConfig(name=f"adversary.{name}", low=0.01, high=1.0, log=True)
        for name in ("epsilon", "ratio", "weight")
    ]
    check_space(space, config)
    values = {"adversary.epsilon": 0.5, "adversary.weight": 2.0, "adversary.ratio": 0.9}
    assert with_values(config, values).adversary == AdversaryConfig(epsilon=0.5, weight=2.0, ramp=0.0)
    values["adversary.mode"] = "mixed"
    assert with_values(config, values).adversary == AdversaryConfig(mode="mixed", epsilon=0.5, ratio=0.9, ramp=0.0)
