"""K1-K3, A8, B5: bundles hold the whole agent, and damage is found."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.checkpoint import read_bundle, state_digest, write_bundle
from tailguard.errors import CheckpointError, ConfigError, StateError
from tailguard.ppo.spaces import describe_space
from tailguard.stateful import Stateful
from tests.agents import collected, tiny_agent
from tests.environments import cartpole


def states(agent: DistributionalPPO) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in agent.parts().items()}


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = {
        "tensor": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "array": np.array([[1, 2]], np.int64),
        "scalar": torch.tensor(3.5),
        "numbers": [1, 2.5, None, True, "text", 2**100],
        "by_number": {0: {"x": torch.zeros(2)}, 1: "y"},
        "pair": (1, 2),
    }
    write_bundle(tmp_path / "bundle", tree, {"note": 1})
    back, manifest = read_bundle(tmp_path / "bundle")
    assert manifest["note"] == 1
    assert state_digest(back) == state_digest(tree)
    assert back["by_number"][1] == "y"
    assert back["pair"] == (1, 2)
    assert isinstance(back["array"], np.ndarray)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "upgd", "adaptive_upgd", "upgdw"])
def test_a_loaded_agent_takes_the_same_next_step(tmp_path: Path, optimizer: str) -> None:
    agent = tiny_agent(optimizer=optimizer, kl_penalty={"target": 0.01}, entropy={"decay_updates": 5}, ent_coef=0.01)
    agent.learn(3 * 128)
    agent.save(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", env=cartpole(4, 0))
    assert state_digest(states(twin)) == state_digest(states(agent))
    for each in (agent, twin):
        each.set_env(cartpole(4, 77))
        each.learn(2 * 128, reset_num_timesteps=False)
    assert state_digest(states(twin)) == state_digest(states(agent))


def test_settings_given_at_load_beat_the_saved_ones(tmp_path: Path) -> None:
    agent = tiny_agent(learning_rate=1e-3)
    agent.learn(128)
    agent.save(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", env=cartpole(4, 0), learning_rate=5e-4, n_epochs=1)
    twin.learn(128, reset_num_timesteps=False)
    assert {group["lr"] for group in twin.learner.optimizer.param_groups} == {5e-4}
    assert twin.config.gamma == agent.config.gamma


def test_observation_statistics_travel_inside_the_bundle(tmp_path: Path) -> None:
    env = VecNormalize(cartpole(4, 0), norm_reward=False, clip_obs=5.0)
    agent = tiny_agent(env)
    agent.learn(256)
    agent.save(tmp_path / "agent")
    for fresh in (cartpole(4, 1), VecNormalize(cartpole(4, 1), norm_reward=False)):  # wrapped by us, or by the user
        twin = DistributionalPPO.load(tmp_path / "agent", env=fresh)
        normalizer = twin.get_vec_normalize_env()
        assert normalizer is not None
        np.testing.assert_array_equal(normalizer.obs_rms.mean, env.obs_rms.mean)
        np.testing.assert_array_equal(normalizer.obs_rms.var, env.obs_rms.var)
        assert normalizer.clip_obs == 5.0
        raw = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
        ours, _ = agent.predict(env.normalize_obs(raw), deterministic=True)
        theirs, _ = twin.predict(normalizer.normalize_obs(raw), deterministic=True)
        np.testing.assert_array_equal(ours, theirs)


def test_memory_starts_fresh_on_load_and_on_set_env(tmp_path: Path) -> None:
    agent = collected(tiny_agent())
    assert agent.live is not None
    assert agent.live.actor_state.hidden.any()
    agent.set_env(cartpole(4, 1))
    assert agent.live is None
    agent.learn(128, reset_num_timesteps=False)
    assert agent.rollout_buffer.starts[0].all()
    assert not agent.rollout_buffer.actor_states[0].hidden.any()
    agent.save(tmp_path / "agent")
    assert DistributionalPPO.load(tmp_path / "agent", env=cartpole(4, 1)).live is None


def test_a_loaded_agent_may_run_on_another_number_of_environments(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.learn(128)
    agent.save(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", env=cartpole(6, 0))
    twin.learn(6 * 32)
    assert twin.rollout_buffer.n_envs == 6


def test_everything_stateful_on_the_agent_is_in_its_parts() -> None:
    agent = tiny_agent()
    agent.learn(128)
    saved = list(agent.parts().values())
    found = [*vars(agent).items(), *((f"learner.{k}", v) for k, v in vars(agent.learner).items())]
    forgotten = [
        name
        for name, value in found
        if isinstance(value, Stateful) and not isinstance(value, type) and not any(value is part for part in saved)
    ]
    assert forgotten == []


def test_saving_twice_replaces_the_bundle_and_leaves_nothing_behind(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent")
    agent.learn(128)
    agent.save(str(tmp_path / "agent"))
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    assert DistributionalPPO.load(tmp_path / "agent").num_timesteps == 128


@pytest.mark.parametrize("name", ["state.safetensors", "tree.json", "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    tiny_agent().save(tmp_path / "agent")
    path = tmp_path / "agent" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=re.escape(name) if damage == "remove" else "damaged|sha256"):
        DistributionalPPO.load(tmp_path / "agent")


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no bundle"):
        DistributionalPPO.load(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="directory"):
        DistributionalPPO.load(tmp_path / "file")


def test_a_bundle_of_a_later_schema_is_refused_by_number(tmp_path: Path) -> None:
    tiny_agent().save(tmp_path / "agent")
    rewrite_manifest(tmp_path / "agent", schema_version=99)
    with pytest.raises(CheckpointError, match="schema version 99"):
        DistributionalPPO.load(tmp_path / "agent")


def rewrite_manifest(bundle: Path, **changes: Any) -> None:
    """Change the manifest with a valid checksum, as an attacker or another version would."""
    manifest = {**json.loads((bundle / "manifest.json").read_text()), **changes}
    text = json.dumps(manifest)
    (bundle / "manifest.json").write_text(text)
    (bundle / "manifest.sha256").write_text(sha256(text.encode()).hexdigest())


def test_a_part_that_is_missing_from_the_bundle_is_refused(tmp_path: Path) -> None:
    agent = tiny_agent()
    saved = states(agent)
    del saved["return_scale"]
    with pytest.raises(StateError, match="return_scale"):
        agent.load_parts(saved)


def test_a_directory_that_cannot_be_written_leaves_the_earlier_bundle(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent")
    (tmp_path / "plain").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match="Cannot write"):
        agent.save(tmp_path / "plain" / "agent")
    DistributionalPPO.load(tmp_path / "agent")


def test_values_that_are_neither_tensor_nor_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="object cannot be stored"):
        write_bundle(tmp_path / "bundle", {"bad": object()}, {})


def test_a_function_as_learning_rate_is_announced_at_load(tmp_path: Path) -> None:
    tiny_agent(learning_rate=lambda remaining: 1e-3 * remaining).save(tmp_path / "agent")
    with pytest.warns(UserWarning, match="learning_rate was a Python function"):
        DistributionalPPO.load(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", learning_rate=1e-4)
    assert twin.config.learning_rate == 1e-4


def test_no_module_of_the_package_unpickles_or_evaluates() -> None:
    source = Path(__file__).parents[1] / "src"
    forbidden = re.compile(
        r"\bimport pickle|cloudpickle|pickle\.load|yaml\.load\(|(?<![\w.])eval\(|(?<![\w.])exec\(|torch\.load\("
    )
    found = [str(path) for path in source.rglob("*.py") if forbidden.search(path.read_text())]
    assert found == []


# replacing, recovering, refusing


def test_a_bundle_that_waits_aside_is_read_and_recovered(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent")
    (tmp_path / "agent").rename(tmp_path / ".agent.previous")  # a crash between the two renames of a replacement
    assert DistributionalPPO.load(tmp_path / "agent").seed == agent.seed
    agent.save(tmp_path / "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


def test_only_bundles_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name, message in (("thesis", "not a bundle, so it is not replaced"), ("file", "is a file")):
        with pytest.raises(CheckpointError, match=message):
            tiny_agent().save(tmp_path / name)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


def test_an_sb3_zip_is_refused_with_the_reason(tmp_path: Path) -> None:
    from stable_baselines3 import PPO

    PPO("MlpPolicy", cartpole(1, 0), n_steps=8, batch_size=8).save(tmp_path / "sb3")
    with pytest.raises(CheckpointError, match="never opened"):
        DistributionalPPO.load(tmp_path / "sb3.zip")


def test_an_older_schema_loads_with_a_warning_that_says_what_was_reset(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.learn(256)
    tree = {
        "observation_space": describe_space(agent.observation_space),
        "action_space": describe_space(agent.action_space),
        "n_envs": agent.n_envs,
        "parts": states(agent),
    }
    del tree["parts"]["episodes"], tree["parts"]["risk"]  # as version 1 had it
    tree["parts"]["progress"]["_num_timesteps_at_start"] = 0
    agent.save(tmp_path / "agent")
    manifest = json.loads((tmp_path / "agent" / "manifest.json").read_text())
    write_bundle(tmp_path / "old", tree, {k: v for k, v in manifest.items() if k not in ("files", "schema_version")})
    rewrite_manifest(tmp_path / "old", schema_version=1)
    with pytest.warns(UserWarning, match="schema version 1.*episodes, risk start fresh"):
        twin = DistributionalPPO.load(tmp_path / "old")
    assert twin.num_timesteps == 256
    ours, theirs = states(agent), states(twin)
    del ours["episodes"], theirs["episodes"]
    assert state_digest(ours) == state_digest(theirs)


def test_a_bundle_from_before_risk_units_could_be_set_has_as_many_as_there_were(tmp_path: Path) -> None:
    agent = tiny_agent(risk={"mode": "episode", "weight": 0.5, "units": 64})
    agent.save(tmp_path / "agent")
    config = json.loads((tmp_path / "agent" / "manifest.json").read_text())["config"]
    assert config["risk"].pop("units") == 64
    rewrite_manifest(tmp_path / "agent", config=config)
    twin = DistributionalPPO.load(tmp_path / "agent")
    assert twin.config.risk.units == 64
    assert state_digest(states(twin)) == state_digest(states(agent))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {}}, "must describe"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": "0"}}}, "must describe"),
        ({"policy_config": {"lstm_hidden_size": 10**9}}, "lstm_hidden_size=1000000000"),
        ({"policy_config": {"lstm_hidden_size": 60_000}}, "has shape"),
        ({"policy_config": {"lstm_hidden_size": 32}}, "has shape"),
        ({"policy_config": {"n_lstm_layers": 2}}, "is missing"),
        ({"config": {"critic": {"n_quantiles": 10**9}}}, "n_quantiles=1000000000"),
        ({"config": {"n_steps": 10**12}}, "GiB"),
        ({"config": {"gama": 1}}, "gama"),
        ({"config": None}, "does not describe"),
        ({"seed": "seed"}, "does not describe"),
        ({"policy": "os.system"}, "no policy"),
        ({"schema_version": True}, "schema version True"),
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tiny_agent().save(tmp_path / "agent")
    manifest = json.loads((tmp_path / "agent" / "manifest.json").read_text())
    merged = {k: {**manifest[k], **v} if isinstance(v, dict) and k != "files" else v for k, v in changes.items()}
    rewrite_manifest(tmp_path / "agent", **merged)
    with pytest.raises(CheckpointError, match=message) as caught:
        DistributionalPPO.load(tmp_path / "agent")
    assert str(tmp_path / "agent") in str(caught.value)


def json_bomb(bundle: Path) -> None:
    (bundle / "tree.json").write_text('{"parts": [' + "[]," * 20_000_000 + "[]]}")


def tensor_bomb(bundle: Path) -> None:
    """A million empty tensors in 60 MB."""
    names = (f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000))
    header = ("{" + ",".join(names) + "}").encode()
    (bundle / "state.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def many_layers(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["policy_config"]["net_arch"] = {"pi": [8] * 200_000, "vf": [8]}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("bomb", "message"),
    [(json_bomb, "at most .* values|bytes"), (tensor_bomb, "1,000,000|header of"), (many_layers, "at most 64 items")],
)
def test_a_bundle_that_would_take_minutes_to_read_is_refused_in_seconds(
    tmp_path: Path, bomb: Callable[[Path], None], message: str
) -> None:
    tiny_agent().save(tmp_path / "agent")
    bomb(tmp_path / "agent")
    sign(tmp_path / "agent")
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        DistributionalPPO.load(tmp_path / "agent")
    assert time.process_time() - start < 5.0


def sign(bundle: Path) -> None:
    """Checksums that fit what is there."""
    files = {}
    for name in ("tree.json", "state.safetensors"):
        data = (bundle / name).read_bytes()
        files[name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    rewrite_manifest(bundle, files=files)


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailguard.checkpoint.MOST_VALUES", 1_000)
    with pytest.raises(CheckpointError, match="Keep long lists of numbers in arrays"):
        write_bundle(tmp_path / "bundle", {"long": list(range(1_001))}, {})
    assert not (tmp_path / "bundle").exists()


def test_a_large_file_in_the_place_of_a_bundle_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # of zeros, on no disk
    with pytest.raises(CheckpointError, match="is a file"):
        DistributionalPPO.load(tmp_path / "large")


def test_a_rollout_larger_than_memory_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ConfigError, match=r"n_steps=1000000000 with 4 environments needs about .* GiB"):
        tiny_agent(n_steps=10**9)


def test_a_failed_write_names_the_place_and_the_space(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(CheckpointError, match=r"plain/agent: .* It needs [0-9,]+ bytes, [0-9,]+ are free"):
        tiny_agent().save(tmp_path / "plain" / "agent")


def test_a_bundle_that_says_nothing_of_its_session_is_refused_by_name(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.learn(128)
    agent.checkpoint(tmp_path / "agent")
    tree, manifest = read_bundle(tmp_path / "agent")
    del tree["session"]
    about = {name: value for name, value in manifest.items() if name not in ("format", "schema_version", "files")}
    write_bundle(tmp_path / "other", tree, about)
    with pytest.raises(CheckpointError, match="does not describe the state of a training"):
        DistributionalPPO.resume(tmp_path / "other", cartpole(4, 0))
