"""E4: numbers that are not finite come in through no door: a bundle, set_parameters, a step, a mask."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.checkpoint import read_bundle, state_digest, write_bundle
from tailguard.errors import CheckpointError, ConfigError, StateError, TrainingDivergedError
from tailguard.rollout.sequences import SequenceBatch
from tests.agents import collected, gradient_of, tiny_agent
from tests.environments import Identity, cartpole, vectorized

ROLLOUT = 4 * 32
Change = Callable[[torch.Tensor], torch.Tensor]


def trained(optimizer: str = "adam", **settings: Any) -> DistributionalPPO:
    env = VecNormalize(cartpole(4, 0), norm_reward=False)
    agent = tiny_agent(env, optimizer=optimizer, kl_penalty={"target": 0.01}, **settings)
    agent.learn(2 * ROLLOUT)
    return agent


def states(agent: DistributionalPPO) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in agent.parts().items()}


def with_number(number: float) -> Change:
    def change(values: Any) -> Any:
        if isinstance(values, float | int):
            return number
        changed = values.clone() if isinstance(values, torch.Tensor) else np.array(values)
        changed.reshape(-1)[-1] = number
        return changed

    return change


def as_type(dtype: torch.dtype) -> Change:
    return lambda values: values.to(dtype)


def changed(tree: Any, path: str, change: Change) -> None:
    """Change one leaf of a tree of state."""
    *way, last = [int(name) if name.isdigit() else name for name in path.split("/")]
    for name in way:
        tree = tree[name]
    tree[last] = change(tree[last])


WEIGHT = "policy/actor.layers.0.weight"
DAMAGE: dict[str, tuple[str, str, Change]] = {
    "nan in a weight": ("adam", WEIGHT, with_number(float("nan"))),
    "inf in a weight": ("adam", "policy/critics.0.head.output.bias", with_number(float("inf"))),
    "nan in a moment": ("adam", "optimizer/state/0/exp_avg", with_number(float("nan"))),
    "negative second moment": ("adam", "optimizer/state/0/exp_avg_sq", with_number(-1e-3)),
    "nan in a step count": ("adam", "optimizer/state/0/step", with_number(float("nan"))),
    "nan in a utility": ("upgd", "optimizer/state/0/avg_utility", with_number(float("nan"))),
    "negative second moment of upgd": ("adaptive_upgd", "optimizer/state/0/sec_moment", with_number(-1e-9)),
    "whole weights": ("adam", WEIGHT, as_type(torch.int64)),
    "complex weights": ("adam", WEIGHT, as_type(torch.complex64)),
    "bfloat16 weights": ("adam", WEIGHT, as_type(torch.bfloat16)),
    "float64 weights": ("adam", WEIGHT, as_type(torch.float64)),
    "float16 moments": ("adaptive_upgd", "optimizer/state/0/first_moment", as_type(torch.float16)),
    "complex moments": ("adam", "optimizer/state/0/exp_avg", as_type(torch.complex64)),
    "moments of another shape": ("adam", "optimizer/state/0/exp_avg", lambda values: values[:-1].clone()),
    "nan in noise statistics": ("adam", "gradient_scaler/statistics/power", with_number(float("nan"))),
    "negative noise statistics": ("adam", "gradient_scaler/statistics/power", with_number(-1.0)),
    "whole noise statistics": ("adam", "gradient_scaler/statistics/mean", as_type(torch.int64)),
    "short noise statistics": ("adam", "gradient_scaler/statistics/power", lambda values: values[:1].clone()),
    "nan in the KL weight": ("adam", "kl_penalty/beta", with_number(float("nan"))),
    "a negative KL weight": ("adam", "kl_penalty/beta", with_number(-1.0)),
    "nan in the return scale": ("adam", "return_scale/mean", with_number(float("nan"))),
    "a return scale of zero": ("adam", "return_scale/snapshot/1", with_number(0.0)),
    "nan in observation statistics": ("adam", "obs_stats/mean", with_number(float("nan"))),
    "a negative variance": ("adam", "obs_stats/var", with_number(-1.0)),
}
EXCHANGED = ("policy", "optimizer", "gradient_scaler", "kl_penalty")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("agents")
    for optimizer in ("adam", "upgd", "adaptive_upgd"):
        trained(optimizer).save(place / optimizer)
    return {path.name: path for path in place.iterdir()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bundle_with_such_a_tensor_is_refused_by_name(tmp_path: Path, bundles: dict[str, Path], damage: str) -> None:
    optimizer, path, change = DAMAGE[damage]
    tree, manifest = read_bundle(bundles[optimizer])
    changed(tree["parts"], path, change)
    write_bundle(tmp_path / "agent", tree, manifest_of(manifest))
    name = path.replace("0", ".*").rpartition("/")[-1]
    with pytest.raises(CheckpointError, match=name) as caught:
        DistributionalPPO.load(tmp_path / "agent", env=cartpole(4, 0))
    assert "\n" not in str(caught.value)
    if path.split("/")[0] in EXCHANGED:
        agent = DistributionalPPO.load(bundles[optimizer], env=cartpole(4, 0))
        before = state_digest(states(agent))
        with pytest.raises(CheckpointError, match=name):
            agent.set_parameters(tmp_path / "agent")
        given = deepcopy(agent.get_parameters())
        changed(given, path.replace("optimizer/", "policy.optimizer/"), change)
        with pytest.raises(StateError, match=name):
            agent.set_parameters(given)
        assert state_digest(states(agent)) == before


def manifest_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in ("files", "format", "schema_version")}


def test_what_is_not_finite_is_not_saved_and_what_was_saved_stays(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent")
    with torch.no_grad():
        agent.policy.critic_list[0].head.last_layer.weight[0, 0] = float("nan")
    with pytest.raises(TrainingDivergedError, match=r"not saved: policy/critics.0.head.output.weight holds nan"):
        agent.save(tmp_path / "agent")
    DistributionalPPO.load(tmp_path / "agent")


def test_set_parameters_takes_all_or_nothing() -> None:
    agent = trained()
    before, given = state_digest(states(agent)), trained().get_parameters()
    given["kl_penalty"] = {"beta": "much"}
    with pytest.raises(StateError, match="beta"):
        agent.set_parameters(given)
    given = tiny_agent(policy_kwargs={"lstm_hidden_size": 4}).get_parameters()
    with pytest.raises(StateError, match="expected"):
        agent.set_parameters(given, exact_match=False)
    assert state_digest(states(agent)) == before


# steps


STEPS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "optimizer_kwargs": {"weight_decay": 1e9}},
    "upgd": {"optimizer": "upgd", "optimizer_kwargs": {"sigma": 1e9}},
    "adaptive_upgd": {"optimizer": "adaptive_upgd", "optimizer_kwargs": {"sigma": 1e9}},
    "upgdw, scaled": {"optimizer": "upgdw", "optimizer_kwargs": {"sigma": 1e9}, "vgs": {"warmup_steps": 0}},
    "in torch": {"optimizer": "adaptive_upgd", "optimizer_kwargs": {"sigma": 1e9, "fused": False}},
    "micro-batches": {"optimizer": "adaptive_upgd", "optimizer_kwargs": {"sigma": 1e9}, "microbatch_size": 16},
}


@pytest.mark.parametrize("settings", STEPS.values(), ids=STEPS)
def test_a_step_beyond_all_bounds_is_taken_back(settings: dict[str, Any]) -> None:
    agent = tiny_agent(learning_rate=1e30, max_skipped_steps=3, return_scale={"enabled": False}, **settings)
    before = {name: weights.clone() for name, weights in agent.policy.state_dict().items()}
    optimizer = state_digest(agent.learner.optimizer.state_dict()["state"])
    statistics = state_digest(agent.learner.gradient_scaler.state_dict())
    with pytest.raises(TrainingDivergedError, match="3 optimizer steps in a row had a step that is not finite"):
        agent.learn(ROLLOUT)
    for name, weights in agent.policy.state_dict().items():
        assert torch.equal(weights, before[name])
    assert state_digest(agent.learner.optimizer.state_dict()["state"]) == optimizer
    assert state_digest(agent.learner.gradient_scaler.state_dict()) == statistics


class NoiseInOneUpdate(BaseCallback):
    """Noise beyond what float32 holds, in the second of three updates."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.weights = self.model.policy.actor.layers[0].weight.detach().clone()

    def _on_rollout_end(self) -> None:
        (group,) = self.model.learner.optimizer.param_groups
        group["sigma"] = 3e38 if self.num_timesteps == 2 * ROLLOUT else 1e-3


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer_kwargs": {"fused": False}}, {"vgs": {"warmup_steps": 0}}], ids=str
)
def test_training_goes_on_from_the_weights_before_steps_that_were_taken_back(settings: dict[str, Any]) -> None:
    settings = {"optimizer": "adaptive_upgd", "learning_rate": 1e-3, "max_skipped_steps": 100, **settings}
    agent, noise = tiny_agent(**settings), NoiseInOneUpdate()
    agent.learn(2 * ROLLOUT, noise)
    assert torch.equal(agent.policy.actor.layers[0].weight, noise.weights)
    assert agent.learner.skipped.total == agent.learner.skipped.in_a_row > 0
    agent.learn(ROLLOUT, noise, reset_num_timesteps=False)
    assert agent.learner.skipped.in_a_row == 0
    assert not torch.equal(agent.policy.actor.layers[0].weight, noise.weights)
    assert all(torch.isfinite(weights).all() for weights in agent.policy.state_dict().values())


def test_no_eps_beside_a_gradient_of_zero_leaves_weights_finite() -> None:
    env = vectorized(
        lambda: Identity(spaces.MultiDiscrete([2, 5])), 4
    )  # three choices that are not there: zero over zero
    agent = tiny_agent(env, optimizer_kwargs={"eps": 0.0}, max_skipped_steps=2)
    with pytest.raises(TrainingDivergedError, match="step that is not finite"):
        agent.learn(ROLLOUT)
    assert all(torch.isfinite(weights).all() for weights in agent.policy.state_dict().values())


@pytest.mark.parametrize(
    "optimizer_kwargs",
    [
        {"eps": -1.0},
        {"betas": "ab"},
        {"lr": 1.0},
        {"generator": torch.Generator()},
        {"epsilon": 1},
    ],
)
def test_options_with_which_no_step_can_be_taken_are_refused_when_the_agent_is_built(
    optimizer_kwargs: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="optimizer_kwargs"):
        tiny_agent(optimizer="adam", optimizer_kwargs=optimizer_kwargs)


# masks


POISONED = ("actions", "log_probs", "advantages", "returns", "target", "old_quantiles", "risk")


def poisoned(batch: SequenceBatch, number: float) -> SequenceBatch:
    """That number wherever a sample does not count."""
    gone = ~batch.valid
    parts = {}
    for name in POISONED:
        values = getattr(batch, name).clone()
        mask = gone if values.ndim == 2 else gone.unsqueeze(-1)
        parts[name] = values.masked_fill(mask, number)
    return replace(batch, **parts)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.Discrete(3), spaces.MultiBinary(2)], ids=str)
@pytest.mark.parametrize("memory", ["lstm", "gru"])
@pytest.mark.parametrize("kind", ["quantile", "categorical"])
def test_what_is_not_finite_in_samples_that_do_not_count_changes_no_gradient(
    number: float, space: Any, memory: str, kind: str
) -> None:
    agent = tiny_agent(
        vectorized(lambda: Identity(space), 4),
        policy_kwargs={"memory": memory},
        critic={"kind": kind, **({"value_clip": 0.2} if kind == "quantile" else {})},
        risk={"mode": "episode", "weight": 0.5},
    )
    collected(agent)
    agent.rollout_buffer.valid[3:7, :2] = False
    agent.move_return_scale()
    batch = agent.sequences()
    gradients = [gradient_of(agent, poisoned(batch, each)) for each in (0.0, number)]
    assert torch.isfinite(gradients[1]).all()
    assert torch.equal(*gradients)
