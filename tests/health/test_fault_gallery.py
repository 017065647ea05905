"""A gallery of faults: realistic bugs put into real environments and learners, each caught by a named line."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from tailguard.doctor import Patient, chosen, examine, gym_patient
from tailguard.doctor import learner as doctor_learner
from tailguard.doctor.checks import Verdict
from tailguard.doctor.patient import Market
from tailguard.env import Costs, TradingVecEnv, oracle_env
from tailguard.env.oracle import oracle_config
from tailguard.market import Bars
from tailguard.market.oracles import oracle_market
from tailguard.normalization import ReturnScale
from tailguard.optim import undo
from tailguard.policy import RecurrentPolicy, State
from tailguard.policy.critics import QuantileHead
from tailguard.policy.policy import Critic
from tailguard.policy.recurrent import LSTM
from tailguard.ppo import DistributionalPPO, PPOConfig, update
from tailguard.ppo import algorithm as algorithm_module
from tailguard.rollout import SequenceBatch, collect
from tests.agents import TINY, TINY_POLICY
from tests.environments import ConstantReward, cartpole

Patch = pytest.MonkeyPatch


MAY_BREAK = ("environment/spaces", "learner/exploit")
"""Lines whose subject itself refuses the fault with an error."""


def verdict(patient: Patient, name: str) -> Verdict:
    (check,) = [check for check in chosen() if check.name == name]
    return examine(patient, [check]).line(name).verdict


def assert_caught(patient: Patient, name: str) -> None:
    found = verdict(patient, name)
    assert found.status == "fail", found
    assert "could not be finished" not in found.advice or name in MAY_BREAK, found  # found, not stumbled over


def learner(make_env: Callable[[int, int], VecEnv] = cartpole, **settings: Any) -> Patient:
    """A small agent in CartPole without velocities, whose episodes are short under a fresh policy."""
    return Patient("tiny", make_env, PPOConfig(**{**TINY, **settings}), policy_kwargs=TINY_POLICY)


# environments


class Walk(gym.Env[Any, Any]):
    """A healthy random walk that ends by itself; subclasses break one thing each."""

    observation_space: spaces.Space[Any] = spaces.Box(-100.0, 100.0, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = float(self.np_random.normal())
        return self.seen(), {}

    def noise(self) -> float:
        return float(self.np_random.normal())

    def seen(self) -> Any:
        return np.array([self.x], np.float32)

    def reward(self) -> float:
        return -abs(self.x)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x += 0.5 * (2 * int(action) - 1) + self.noise()
        return self.seen(), self.reward(), abs(self.x) > 8.0, False, {}


class SometimesNaN(Walk):
    def seen(self) -> Any:
        return np.array([np.nan if self.x > 3.0 else self.x], np.float32)


class InfiniteReward(Walk):
    def reward(self) -> float:
        return float("inf") if self.x > 3.0 else 0.5


class NoReward(Walk):
    def reward(self) -> float:
        return 0.0


class Unseeded(Walk):
    def noise(self) -> float:
        return float(np.random.default_rng().normal())


class SharedState(Walk):
    visits = 0

    def reward(self) -> float:
        SharedState.visits += abs(self.x) > 2.0
        return float(SharedState.visits)


class OutsideItsSpace(Walk):
    observation_space = spaces.Box(-1e-3, 1e-3, (1,), np.float32)


class TimeLimitAsDeath(ConstantReward):
    def __init__(self) -> None:
        super().__init__(limit=50, truncates=False)


ENVIRONMENTS = [
    (SometimesNaN, "environment/finite"),
    (InfiniteReward, "environment/finite"),
    (NoReward, "environment/reward"),
    (Unseeded, "environment/seeding"),
    (SharedState, "environment/isolation"),
    (OutsideItsSpace, "environment/spaces"),
    (TimeLimitAsDeath, "environment/truncation"),
]


@pytest.mark.parametrize(("env", "line"), ENVIRONMENTS, ids=lambda case: getattr(case, "__name__", ""))
def test_a_broken_environment_is_named(env: type[gym.Env[Any, Any]], line: str) -> None:
    assert_caught(gym_patient(env.__name__, env), line)


@pytest.mark.parametrize("line", sorted({line for _, line in ENVIRONMENTS}))
def test_a_healthy_environment_passes_the_same_lines(line: str) -> None:
    assert verdict(gym_patient("walk", Walk), line).status == "pass"


class FloatDones(VecEnvWrapper):
    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        return obs, rewards, dones.astype(np.float32), infos


class ForgetsLastObservation(FloatDones):
    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        return obs, rewards, dones, [{k: v for k, v in i.items() if k != "terminal_observation"} for i in infos]


class ReusesItsArray(FloatDones):
    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self.venv.step_wait()
        if not hasattr(self, "kept"):
            self.kept = np.array(obs)
        self.kept[:] = obs
        return self.kept, rewards, dones, infos


@pytest.mark.parametrize(
    ("wrapper", "line"),
    [
        (FloatDones, "environment/dones"),
        (ForgetsLastObservation, "environment/terminal_observation"),
        (ReusesItsArray, "environment/copies"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_broken_vectorization_is_named(wrapper: type[VecEnvWrapper], line: str) -> None:
    assert verdict(learner(), line).status == "pass"
    assert_caught(learner(lambda n, seed: wrapper(cartpole(n, seed))), line)


# the learner: each fault is a patch of one function of the real thing


def state_stored_after_the_step(patch: Patch) -> None:
    original = collect.collect_steps

    def shifted(env: Any, policy: Any, buffer: Any, *rest: Any) -> Any:
        raw = original(env, policy, buffer, *rest)
        firsts = [buffer.observations[k * buffer.sequence_length] for k in range(len(buffer.actor_states))]
        with torch.no_grad():
            buffer.actor_states[:] = [
                policy.action_step(torch.from_numpy(obs), state)[1]
                for obs, state in zip(firsts, buffer.actor_states, strict=True)
            ]
        return raw

    patch.setattr(algorithm_module, "collect_steps", shifted)


def leave_gradients_to_torch(patch: Patch) -> None:
    """For faults of the definitions in ppo/update.py, which the native core does not go through."""
    for part in ("why_torch_actor", "why_torch_critics"):
        patch.setattr(update, part, lambda learner: "a fault of the definition")


def episode_starts_ignored_in_training(patch: Patch) -> None:
    original = SequenceBatch.layout

    def without_starts(self: SequenceBatch) -> Any:
        return type(original(self))(np.zeros_like(self.starts))

    patch.setattr(SequenceBatch, "layout", without_starts)
    leave_gradients_to_torch(patch)


def critic_detached_from_its_memory(patch: Patch) -> None:
    def features(self: Critic, obs: Any, layout: Any, state: Any) -> torch.Tensor:
        return self.trunk.layers(self.trunk.memory.unroll(obs, layout, state).features.detach())  # type: ignore[no-any-return]

    patch.setattr(Critic, "features", features)
    leave_gradients_to_torch(patch)


def optimizer_misses_a_group(patch: Patch) -> None:
    original = update.take_step

    def without_actor(learner: Any, *rest: Any) -> Any:
        learner.vector.gradient[learner.vector.span("actor.")] = 0.0
        return original(learner, *rest)

    patch.setattr(update, "take_step", without_actor)


def learning_rate_overwritten(patch: Patch) -> None:
    original = undo.scaled_step

    def stuck(optimizer: torch.optim.Optimizer, factor: float) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 1e-7
        return original(optimizer, factor)

    patch.setattr(undo, "scaled_step", stuck)


def accumulation_without_weights(patch: Patch) -> None:
    original = update.gradient_source

    def unweighted(*arguments: Any) -> Any:
        add_gradient = original(*arguments)
        return lambda chosen, share: add_gradient(chosen, 1.0)

    for module in (update, doctor_learner):
        patch.setattr(module, "gradient_source", unweighted)


def return_scale_moves_alone(patch: Patch) -> None:
    patch.setattr(RecurrentPolicy, "rescale_critics", lambda self, before, after, first: [])


def quantile_levels_turned_round(patch: Patch) -> None:
    original = QuantileHead.loss

    def turned(self: QuantileHead, output: Any, target: Any, old: Any) -> torch.Tensor:
        return original(self, output.flip(-1), target, old)

    patch.setattr(QuantileHead, "loss", turned)
    leave_gradients_to_torch(patch)


def trace_runs_over_episode_ends(patch: Patch) -> None:
    original = collect.advantages

    def leaking(rewards: Any, values: Any, successors: Any, dones: Any, gamma: float, lam: float) -> Any:
        return original(rewards, values, successors, np.zeros_like(dones), gamma, lam)

    patch.setattr(collect, "advantages", leaking)


def ends_are_bootstrapped_from_the_next_episode(patch: Patch) -> None:
    patch.setattr(collect, "successor_values", lambda values, terminal, terminated, truncated: values[1:])


def environments_share_one_memory(patch: Patch) -> None:
    original = LSTM.step

    def mixed(self: LSTM, x: torch.Tensor, state: State) -> Any:
        mean = State(state.hidden.mean(1, True).expand_as(state.hidden), state.cell.mean(1, True).expand_as(state.cell))
        return original(self, x, mean)

    patch.setattr(LSTM, "step", mixed)


def memory_survives_the_episode(patch: Patch) -> None:
    patch.setattr(State, "keep", lambda self, mask: self)


def return_scale_not_loaded(patch: Patch) -> None:
    patch.setattr(ReturnScale, "load_state_dict", lambda self, state: None)


def weights_not_copied_by_exploit(patch: Patch) -> None:
    patch.setattr(RecurrentPolicy, "load_state_dict", lambda self, state, strict=True: None)


def batches_drawn_without_a_seed(patch: Patch) -> None:
    original = update.minibatches
    patch.setattr(update, "minibatches", lambda chosen, size, rng: original(chosen, size, np.random.default_rng()))


def loss_is_sometimes_not_finite(patch: Patch) -> None:
    original, calls = update.value_losses, count()

    def broken(*arguments: Any) -> Any:
        value, risk = original(*arguments)
        return value * (float("nan") if next(calls) % 5 == 0 else 1.0), risk

    patch.setattr(update, "value_losses", broken)
    leave_gradients_to_torch(patch)


def critic_scaled_to_nothing(patch: Patch) -> None:
    original = update.take_step

    def second_is_dead(learner: Any, schedules: Any, row: Any) -> Any:
        learner.vector.gradient[learner.vector.span("critics.1.")] = 0.0
        return original(learner, schedules, row)

    patch.setattr(update, "take_step", second_is_dead)


LEARNER = [
    (state_stored_after_the_step, "learner/first_log_ratio"),
    (episode_starts_ignored_in_training, "learner/first_log_ratio"),
    (critic_detached_from_its_memory, "learner/critic_gradients"),
    (optimizer_misses_a_group, "learner/weights_move"),
    (learning_rate_overwritten, "learner/learning_rate"),
    (accumulation_without_weights, "learner/accumulation"),
    (return_scale_moves_alone, "learner/return_scale"),
    (quantile_levels_turned_round, "learner/quantile_sides"),
    (trace_runs_over_episode_ends, "learner/advantages"),
    (ends_are_bootstrapped_from_the_next_episode, "learner/advantages"),
    (environments_share_one_memory, "learner/memory_isolation"),
    (memory_survives_the_episode, "learner/memory_reset"),
    (return_scale_not_loaded, "learner/save_load"),
    (weights_not_copied_by_exploit, "learner/exploit"),
    (batches_drawn_without_a_seed, "learner/repeatable"),
    (loss_is_sometimes_not_finite, "learner/alerts"),
    (critic_scaled_to_nothing, "learner/alerts"),
]


@pytest.mark.parametrize(("fault", "line"), LEARNER, ids=lambda case: getattr(case, "__name__", ""))
def test_a_fault_of_the_learner_is_named(fault: Callable[[Patch], None], line: str, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert_caught(learner(), line)


@pytest.mark.parametrize("line", sorted({line for _, line in LEARNER}))
def test_a_healthy_learner_passes_the_same_lines(line: str) -> None:
    found = verdict(learner(), line)
    assert found.status == "pass", found


# markets


def market_patient(
    features: Callable[[Bars], Any] | None = None, costs: Costs | None = None, env: type[TradingVecEnv] = TradingVecEnv
) -> Patient:
    market = oracle_market("regime")
    config = oracle_config(market)
    config = config if costs is None else config.replace(costs=costs)

    def make(bars: Bars, n_envs: int, seed: int) -> TradingVecEnv:
        shown = market.features(bars) if features is None else features(bars)
        return env(bars, shown, ("shown",), n_envs=n_envs, look_back=market.look_back, seed=seed, config=config)

    return Patient(
        "market",
        lambda n, seed: oracle_env(market, n, seed, n_bars=2_000),
        PPOConfig(**TINY),
        policy_kwargs=TINY_POLICY,
        market=Market(market.bars(2_000, 0), make),
    )


def tomorrow(bars: Bars) -> Any:
    """A feature that is shifted the wrong way."""
    growth = np.zeros(bars.close.shape)
    growth[:-1] = bars.close[1:] / bars.close[:-1] - 1.0
    return growth[..., None].astype(np.float32)


def scaled_on_everything(bars: Bars) -> Any:
    """A feature normalized with the mean and std of all bars, the future included."""
    return ((bars.close - bars.close.mean(0)) / bars.close.std(0))[..., None].astype(np.float32)


class InterestFromNowhere(TradingVecEnv):
    def step_wait(self) -> Any:
        obs, rewards, dones, infos = super().step_wait()
        self.rewards = self.rewards + 1e-5
        return obs, rewards + np.float32(1e-5), dones, infos


FREE = Costs(fee_bps=0.0, half_spread_bps=0.0, slippage_bps=0.0, impact=0.0, borrow_bps_per_year=0.0)


@pytest.mark.parametrize(
    ("patient", "line"),
    [
        (market_patient(features=tomorrow), "market/look_ahead"),
        (market_patient(features=scaled_on_everything), "market/look_ahead"),
        (market_patient(costs=FREE), "market/costs"),
        (market_patient(env=InterestFromNowhere), "market/zero_weights"),
    ],
    ids=["shifted_feature", "scaler_fitted_on_the_future", "free_trading", "interest_from_nowhere"],
)
def test_a_fault_of_the_market_is_named(patient: Patient, line: str) -> None:
    assert verdict(market_patient(), line).status == "pass"
    assert_caught(patient, line)


def test_the_gallery_is_large_enough() -> None:
    assert len(ENVIRONMENTS) + 3 + len(LEARNER) + 4 >= 25


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on() -> None:
    class Broken(Walk):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            raise RuntimeError("no market today")

    found = examine(gym_patient("broken", Broken), chosen(only="environment/"))
    assert len(found.failures) == len(found.lines)
    assert "no market today" in found.lines[0].verdict.figure


def test_an_agent_of_the_gallery_is_the_real_one() -> None:
    assert type(learner().agent()) is DistributionalPPO
