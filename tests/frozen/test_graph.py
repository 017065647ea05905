"""The ONNX graph of a frozen policy: one step in onnxruntime is one step of the agent and of the numpy runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.frozen import export
from tailguard_runtime import FrozenPolicy, FrozenPolicyError, State
from tests.agents import tiny_agent
from tests.frozen.test_frozen_policy import AGREEMENT, margin, random_agent
from tests.random_agents import AnySpaces


class Graph:
    """`step.onnx` with the interface of a frozen policy."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(folder / "step.onnx", providers=["CPUExecutionProvider"])
        self.inputs = {given.name: given.type for given in self.session.get_inputs()}

    def step(self, seen: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        dtype = {"tensor(float)": np.float32, "tensor(double)": np.float64}[self.inputs["observation"]]
        given = {"observation": seen.astype(dtype), "hidden": state.hidden, "cell": state.cell}
        found = self.session.run(None, {name: given[name] for name in self.inputs})
        after = dict(zip([output.name for output in self.session.get_outputs()], found, strict=True))
        state = State(after.get("hidden_after", state.hidden), after.get("cell_after", state.cell))
        return after["action"], state


def disagreement(agent: DistributionalPPO, folder: Path, n_steps: int, n: int = 3) -> float:
    """Largest difference of actions, relative to half their range, and of states, relative to their size above 1."""
    policy, graph, space = FrozenPolicy.load(folder), Graph(folder), agent.action_space
    rng, worst = np.random.default_rng(3), 0.0
    own = theirs = policy.initial_state(n)
    for _ in range(n_steps):
        seen, starts = rng.normal(size=(n, *agent.observation_space.shape)).astype(np.float32), rng.random(n) < 0.05
        output, _ = policy.network.step(policy.normalized(seen), own.keep(starts))
        action, own = policy.step(seen, own, starts)
        found, theirs = graph.step(seen, theirs.keep(starts))
        assert found.shape == action.shape
        assert found.dtype == action.dtype
        if isinstance(space, spaces.Box):
            worst = max(worst, np.abs((found - action) / ((space.high - space.low) / 2)).max())
        else:
            worst = max(worst, margin(policy, output, found))
        apart = (np.abs(a - b) / np.maximum(np.abs(a), 1.0) for a, b in zip(own, theirs, strict=True))
        worst = max([worst, *(part.max(initial=0.0) for part in apart)])
    return float(worst)


@pytest.mark.parametrize("number", range(12))
def test_the_graph_of_a_random_agent_agrees(tmp_path: Path, number: int) -> None:
    agent = random_agent(number, 12)
    assert disagreement(agent, export(agent, tmp_path / "frozen"), 100) <= AGREEMENT


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12, 112))
def test_the_graph_of_a_random_agent_of_any_size_agrees(tmp_path: Path, number: int) -> None:
    agent = random_agent(number, 100)
    assert disagreement(agent, export(agent, tmp_path / "frozen"), 500) <= 2 * AGREEMENT  # float32 throughout


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"])
@pytest.mark.parametrize("memory", ["lstm", "gru", "none"])
def test_every_activation_agrees(tmp_path: Path, activation: str, memory: str) -> None:
    env = AnySpaces(2, 0, 5, spaces.Box(-2.0, 3.0, (2, 2), np.float32))
    agent = tiny_agent(env, policy_kwargs={"activation_fn": activation, "memory": memory, "net_arch": [16, 16]})
    assert disagreement(agent, export(agent, tmp_path / "frozen"), 50) <= AGREEMENT


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([2, 5, 3]), spaces.MultiBinary(4), spaces.Discrete(4, start=-2)]
)
def test_choices_and_normalized_observations_agree(tmp_path: Path, space: spaces.Space[Any]) -> None:
    agent = tiny_agent(VecNormalize(AnySpaces(2, 0, 5, space), norm_reward=False, clip_obs=1.5))
    agent.learn(128)
    assert disagreement(agent, export(agent, tmp_path / "frozen"), 100) <= AGREEMENT


def test_a_folder_without_a_graph_loads_and_one_with_a_foreign_name_does_not(tmp_path: Path) -> None:
    folder = export(tiny_agent(), tmp_path / "frozen")
    sums = folder / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if "onnx" not in line))
    (folder / "step.onnx").unlink()
    FrozenPolicy.load(folder)
    sums.write_text("".join(lines).replace("step.onnx", "other.onnx"))
    with pytest.raises(FrozenPolicyError, match="SHA256SUMS is damaged"):
        FrozenPolicy.load(folder)
