"""M13: a frozen policy decides as the agent did, with numpy alone; a folder that is not whole is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from tailguard import DistributionalPPO
from tailguard.errors import CheckpointError, ConfigError
from tailguard.frozen import export
from tailguard_runtime import FrozenPolicy, FrozenPolicyError, State
from tests.agents import tiny_agent
from tests.environments import cartpole
from tests.random_agents import AnySpaces, random_settings
from tests.test_random_agents import accepted

RUNTIME = Path(__file__).parents[2] / "runtime" / "src"
AGREEMENT = 1e-6


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frozen policy of an agent of two LSTM layers; tests work on copies."""
    agent = tiny_agent(policy_kwargs={"n_lstm_layers": 2})
    agent.learn(128)
    return export(agent, tmp_path_factory.mktemp("policies") / "frozen")


def disagreement(agent: DistributionalPPO, policy: FrozenPolicy, n_steps: int, n: int = 3) -> float:
    """Largest difference of actions and states over sequences with new episodes.

    Actions relative to half their range, choices by how far what was chosen lies below the best one; half of the
    difference of cells, relative to their size where it is above 1: the agent itself sums them in float32.
    """
    rng, space = np.random.default_rng(7), agent.action_space
    n_layers = agent.policy.actor.memory.n_layers
    state, own, worst = None, policy.initial_state(n), 0.0
    for step in range(n_steps):
        seen = rng.normal(size=(n, *agent.observation_space.shape)).astype(np.float32)
        starts = rng.random(n) < (1.0 if step == 0 else 0.05)
        expected, state = agent.predict(agent.obs_stats.normalize(seen), state, starts, deterministic=True)
        before = own.keep(starts)
        action, own = policy.step(seen, own, starts)
        assert action.shape == expected.shape
        assert action.dtype == expected.dtype
        if isinstance(space, spaces.Box):
            worst = max(worst, np.abs((action - expected) / ((space.high - space.low) / 2)).max())
        else:
            worst = max(worst, margin(policy, policy.network.step(policy.normalized(seen), before)[0], expected))
        worst = max(worst, np.abs(own.hidden - state[0][:n_layers]).max(initial=0.0))
        cell = state[1][: len(own.cell)]
        worst = max(worst, (np.abs(own.cell - cell) / np.maximum(np.abs(cell), 1.0)).max(initial=0.0) / 2.0)
    return float(worst)


def margin(policy: FrozenPolicy, output: np.ndarray, chosen: np.ndarray) -> float:
    """How far the outputs of other choices lie below the best ones: 0 where they are the policy's own."""
    if policy.layout.action_kind == "MultiBinary":
        other = policy.actions(output).reshape(output.shape) != chosen.reshape(output.shape)
        return float(np.abs(output[other]).max(initial=0.0))
    logits = np.where(policy.forbidden, -np.inf, output.reshape(len(output), *policy.forbidden.shape))
    indices = chosen.reshape(len(output), -1) - policy.start
    return float((logits.max(-1) - np.take_along_axis(logits, indices[..., None], -1)[..., 0]).max())


def random_agent(number: int, largest: int) -> DistributionalPPO:
    settings, agent, _ = accepted(Random(number), largest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings that go badly together
        agent.learn(settings.n_envs * agent.config.n_steps)
    return agent


@pytest.mark.parametrize("number", range(24))
def test_a_random_agent_and_its_frozen_policy_agree(tmp_path: Path, number: int) -> None:
    agent = random_agent(number, 12)
    policy = FrozenPolicy.load(export(agent, tmp_path / "frozen"))
    assert disagreement(agent, policy, 200) <= AGREEMENT


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24, 224))
def test_a_random_agent_of_any_size_and_its_frozen_policy_agree(tmp_path: Path, number: int) -> None:
    agent = random_agent(number, 100)
    policy = FrozenPolicy.load(export(agent, tmp_path / "frozen"))
    assert disagreement(agent, policy, 500) <= AGREEMENT


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs", [{}, {"memory": "gru"}, {"n_lstm_layers": 2}, {"memory": "none"}], ids=["lstm", "gru", "two", "none"]
)
def test_agent_and_frozen_policy_agree_over_100_000_bars(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    env = AnySpaces(4, 0, 48, spaces.Box(-1.0, 1.0, (3,), np.float32))
    widths = {} if kwargs.get("memory") == "none" else {"lstm_hidden_size": 64}
    policy_kwargs = {"net_arch": [64, 64], **widths, **kwargs}
    agent = DistributionalPPO("MlpLstmPolicy", env, policy_kwargs=policy_kwargs, n_steps=64, seed=0)
    agent.learn(2_000)
    assert disagreement(agent, FrozenPolicy.load(export(agent, tmp_path / "frozen")), 100_000, n=1) <= AGREEMENT


def test_every_kind_of_agent_is_among_the_random_ones() -> None:
    every = [random_settings(Random(number), 12) for number in range(24)]
    kinds = {(type(each.action_space).__name__, each.policy_kwargs.get("action_bounds")) for each in every}
    assert len(kinds) == 5  # two kinds of bounds of a Box, and three other spaces
    assert {each.policy_kwargs.get("memory") for each in every} == {None, "gru"}
    assert {each.policy for each in every} == {"MlpPolicy", "MlpLstmPolicy"}
    assert {each.normalized for each in every} == {True, False}
    assert {each.policy_kwargs.get("n_lstm_layers", 1) for each in every} >= {1, 2}


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"])
@pytest.mark.parametrize("memory", ["lstm", "gru", "none"])
def test_every_activation_agrees(tmp_path: Path, activation: str, memory: str) -> None:
    env = AnySpaces(2, 0, 5, spaces.Box(-2.0, 3.0, (2, 2), np.float32))
    agent = tiny_agent(env, policy_kwargs={"activation_fn": activation, "memory": memory, "net_arch": [16, 16]})
    assert disagreement(agent, FrozenPolicy.load(export(agent, tmp_path / "frozen")), 100) <= AGREEMENT


def test_raw_observations_go_in_where_the_agent_saw_normalized_ones(tmp_path: Path) -> None:
    env = VecNormalize(AnySpaces(4, 0, 3, spaces.Discrete(3)), norm_reward=False, clip_obs=2.0)
    agent = tiny_agent(env)
    agent.learn(256)
    env.obs_rms.mean += 3.0
    policy = FrozenPolicy.load(export(agent, tmp_path / "frozen"))
    assert disagreement(agent, policy, 100) <= AGREEMENT
    raw = np.full(3, 3.0)
    plain = agent.predict(raw.astype(np.float32), deterministic=True)[1][0][0]
    assert not np.allclose(policy.step(raw)[1].hidden[0], plain, atol=1e-3)


def test_one_observation_gives_one_action_and_many_do_not_see_each_other(frozen: Path) -> None:
    policy = FrozenPolicy.load(frozen)
    seen = np.random.default_rng(0).normal(size=(5, *policy.layout.observation_shape))
    together, after = policy.step(seen)
    for i, one in enumerate(seen):
        action, state = policy.step(one)
        assert action == together[i]
        np.testing.assert_allclose(state.hidden[:, 0], after.hidden[:, i], atol=AGREEMENT)
    again, same = policy.step(seen)
    assert np.array_equal(again, together)
    assert np.array_equal(same.hidden, after.hidden)


def test_the_contract_says_what_the_policy_is(frozen: Path) -> None:
    contract = FrozenPolicy.load(frozen).contract
    assert contract["policy"] == {
        "rnn": "lstm",
        "hidden_size": 8,
        "n_rnn_layers": 2,
        "layers": [8],
        "activation": "tanh",
    }
    assert contract["action"] == {"kind": "Discrete", "counts": [2], "start": [0], "shape": [], "dtype": "int64"}
    assert contract["market"] is None
    assert contract["source"]["num_timesteps"] == 128
    assert contract["source"]["versions"]["torch"] == torch.__version__


def test_wrong_observations_and_states_are_refused(frozen: Path) -> None:
    policy = FrozenPolicy.load(frozen)
    good = np.zeros((2, *policy.layout.observation_shape), np.float32)
    with pytest.raises(FrozenPolicyError, match="has shape"):
        policy.step(good[:, :-1])
    with pytest.raises(FrozenPolicyError, match="has shape"):
        policy.step(good[None])
    with pytest.raises(FrozenPolicyError, match="NaN"):
        policy.step(good * np.nan)
    with pytest.raises(FrozenPolicyError, match="state has shapes"):
        policy.step(good, policy.initial_state(3))
    with pytest.raises(FrozenPolicyError, match="state has shapes"):
        policy.step(good, State(np.zeros((1, 2, 8), np.float32), np.zeros((1, 2, 8), np.float32)))
    with pytest.raises(FrozenPolicyError, match="episode_start"):
        policy.step(good, None, [True])


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def written(folder: Path, files: dict[str, bytes], signed: bool) -> Path:
    """A folder of these files; with checksums that fit them where it is `signed`."""
    folder.mkdir()
    if signed:
        sums = [f"{sha256(data).hexdigest()}  {name}\n" for name, data in files.items() if name != "SHA256SUMS"]
        files = {**files, "SHA256SUMS": "".join(sums).encode()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", ["contract.json", "weights.safetensors", "test_vector.safetensors", "SHA256SUMS"])
def test_a_damaged_or_incomplete_folder_is_refused(frozen: Path, tmp_path: Path, name: str) -> None:
    files = files_of(frozen)
    middle = len(files[name]) // 2
    flipped = files[name][:middle] + bytes([files[name][middle] ^ 1]) + files[name][middle + 1 :]
    for i, data in enumerate((flipped, files[name][:-2], b"")):
        with pytest.raises(FrozenPolicyError, match="damaged"):
            FrozenPolicy.load(written(tmp_path / str(i), {**files, name: data}, signed=False))
    missing = written(tmp_path / "missing", files, signed=False)
    (missing / name).unlink()
    with pytest.raises(FrozenPolicyError, match="incomplete"):
        FrozenPolicy.load(missing)
    (missing / name).symlink_to(frozen / name)
    with pytest.raises(FrozenPolicyError, match="Cannot read"):
        FrozenPolicy.load(missing)


def edited(contract: dict[str, Any], path: str, value: Any) -> bytes:
    """The contract with another value at `part.name`."""
    changed = json.loads(json.dumps(contract))
    *parts, name = path.split(".")
    for part in parts:
        changed = changed[part]
    changed[name] = value
    return json.dumps(changed).encode()


EDITS = [
    *[("format", "other"), ("schema_version", 2), ("schema_version", "1"), ("policy", None), ("policy.rnn", "rnn")],
    *[("policy.hidden_size", 10**9), ("policy.hidden_size", 9), ("policy.n_rnn_layers", 3), ("policy.layers", [8, 8])],
    *[("policy.layers", 8), ("policy.activation", "sin"), ("observation.shape", [2**40]), ("observation.shape", [])],
    *[("observation.normalizer", {"clip": 10.0}), ("action.kind", "Box"), ("action.kind", []), ("action.counts", [])],
    *[("action.counts", [3]), ("action.shape", [2]), ("action.dtype", "object"), ("action.start", [1.5])],
    *[("policy.rnn", "gru"), ("action.counts", [1]), ("policy.activation", "relu"), ("action.start", [1])],
]


@pytest.mark.parametrize(("path", "value"), EDITS)
def test_a_signed_contract_of_another_policy_is_refused(frozen: Path, tmp_path: Path, path: str, value: Any) -> None:
    files = files_of(frozen)
    files["contract.json"] = edited(json.loads(files["contract.json"]), path, value)
    with pytest.raises(FrozenPolicyError):
        FrozenPolicy.load(written(tmp_path / "edited", files, signed=True))


def test_signed_files_that_are_spoiled_are_refused_without_another_error(frozen: Path, tmp_path: Path) -> None:
    files, rng = files_of(frozen), Random(0)
    refused = 0
    for i in range(150):
        name = rng.choice(["contract.json", "weights.safetensors", "test_vector.safetensors"])
        data = bytearray(files[name])
        for _ in range(rng.choice((1, 3))):
            data[rng.randrange(min(len(data), 700))] = rng.randrange(256)
        cut = bytes(data[: rng.randrange(len(data))]) if rng.random() < 0.2 else bytes(data)
        folder = written(tmp_path / str(i), {**files, name: cut}, signed=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers that overflow on their way to the refusal
            try:
                FrozenPolicy.load(folder)
            except FrozenPolicyError:
                refused += 1
    assert refused >= 75


def test_weights_of_another_agent_are_refused_by_the_test_vector(frozen: Path, tmp_path: Path) -> None:
    other = export(tiny_agent(seed=5, policy_kwargs={"n_lstm_layers": 2}), tmp_path / "other")
    files = {**files_of(frozen), "weights.safetensors": (other / "weights.safetensors").read_bytes()}
    with pytest.raises(FrozenPolicyError, match="test vector"):
        FrozenPolicy.load(written(tmp_path / "mixed", files, signed=True))


def test_an_export_replaces_a_frozen_policy_and_nothing_else(tmp_path: Path) -> None:
    agent = tiny_agent()
    place = export(agent, tmp_path / "frozen")
    before = files_of(place)
    agent.learn(128)
    assert files_of(export(agent, place)) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("a file of the user stays")
    with pytest.raises(CheckpointError, match="not a frozen policy"):
        export(agent, tmp_path / "mine")


def test_an_interrupted_replacement_leaves_the_policy_before_readable(frozen: Path, tmp_path: Path) -> None:
    written(tmp_path / ".frozen.previous", files_of(frozen), signed=False)
    assert FrozenPolicy.load(tmp_path / "frozen").contract["format"] == "tailguard-frozen-policy"


def test_an_agent_with_code_of_its_own_is_not_exported(tmp_path: Path) -> None:
    hooked, replaced = tiny_agent(), tiny_agent()
    hooked.policy.actor.memory.register_forward_hook(lambda *_: None)
    replaced.policy.actor.layers[1] = nn.LeakyReLU(0.5)
    for agent in (hooked, replaced):
        with pytest.raises(ConfigError, match=r"policy\.actor"):
            export(agent, tmp_path / "frozen")


def test_the_runtime_needs_numpy_alone(frozen: Path) -> None:
    code = f"""
import sys
for name in ("torch", "tailguard", "stable_baselines3", "gymnasium", "safetensors", "polars", "scipy", "pydantic"):
    sys.modules[name] = None
sys.path.insert(0, {str(RUNTIME)!r})
from tailguard_runtime import FrozenPolicy
policy = FrozenPolicy.load({str(frozen)!r})
action, state = policy.step([[0.0] * policy.layout.n_features])
own = {{name.partition(".")[0] for name, module in sys.modules.items() if module is not None}}
print(action.tolist(), *sorted(own - set(sys.stdlib_module_names)))
"""
    found = subprocess.run([sys.executable, "-S", "-c", no_site(code)], capture_output=True, text=True, check=True)
    others = [name for name in found.stdout.split()[1:] if not name.startswith("_")]
    assert others == ["numpy", "tailguard_runtime"]


def no_site(code: str) -> str:
    """Without the start-up files of installed packages, only the folder that numpy lies in."""
    return f"import sys; sys.path.append({str(Path(np.__file__).parents[1])!r})\n{code}"


def test_a_policy_of_a_gymnasium_environment_has_no_market(tmp_path: Path) -> None:
    agent = tiny_agent(cartpole(2, 0), "MlpPolicy")
    policy = FrozenPolicy.load(export(agent, tmp_path / "frozen"))
    assert policy.contract["market"] is None
    assert policy.initial_state(3).hidden.size == 0
