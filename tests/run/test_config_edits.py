"""K7: a config.yaml that was edited after a stop is taken over with a line per key, or refused by the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from shutil import copytree
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from tailguard import DistributionalPPO
from tailguard.checkpoint import read_manifest
from tailguard.cli.train import go_on, start
from tailguard.config_edits import ConfigEdits, reason_against
from tailguard.errors import ConfigError, DataError, InertSettingError
from tailguard.examination import examine
from tailguard.experiment import experiment_config, saved_experiment
from tailguard.population.runs import begin, trained_to_the_end
from tailguard.ppo import PPOConfig
from tailguard.robustness.bench import AttackConfig
from tailguard.robustness.runs import attack_run
from tailguard.run import RunFolder
from tailguard.yaml_files import read_yaml, write_yaml
from tests.runs import STEPS_PER_UPDATE, tiny_experiment
from tests.runs import begin as train_tiny
from tests.test_examination import TINY, write


def edit(folder: RunFolder, **changes: Any) -> None:
    """Write values into config.yaml, as a user with an editor does; `__` stands for a dot."""
    tree = read_yaml(folder.config_file)
    for key, value in changes.items():
        place: Any = tree
        *path, last = key.split("__")
        for name in path:
            place = place[name]
        assert place[last] != value
        place[last] = value
    folder.config_file.write_text(write_yaml(tree))


def said_by(folder: RunFolder) -> dict[str, Any]:
    """What the newest checkpoint says it was trained with."""
    return dict(read_manifest(folder.last_checkpoint())["config"])


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    place = tmp_path_factory.mktemp("edits")
    with chdir(place):
        write(place / "bars.csv")
        start(None, {"data": {"files": ["bars.csv"]}}, TINY, "first", "quiet", False, report=False)
    return place


@pytest.fixture
def first(template, tmp_path, monkeypatch) -> RunFolder:
    copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return RunFolder("runs/first")


def test_what_can_change_is_taken_over_with_a_line_per_key(first, capsys):
    edit(first, steps=256, ppo__gamma=0.5, ppo__n_epochs=3, ppo__learning_rate=1e-5, data__costs__fee_bps=30.0)
    go_on("first", "live")
    lines = [line for line in capsys.readouterr().out.splitlines() if "was edited" in line]
    for key, value in (("steps", 256), ("ppo.gamma", 0.5), ("ppo.n_epochs", 3), ("data.costs.fee_bps", 30.0)):
        assert sum(f"{key} = {value}" in line for line in lines) == 1, key
    assert sum("ppo.learning_rate" in line for line in lines) == 1
    assert len(lines) == 5
    assert first.steps()[-1] == 256
    now = said_by(first)
    assert (now["gamma"], now["n_epochs"], now["learning_rate"]) == (0.5, 3, 1e-5)
    rates = [json.loads(line)["train/learning_rate"] for line in first.metrics_file.read_text().splitlines()]
    assert rates[-1] == 1e-5 != rates[0]
    manifest = json.loads(first.manifest_file.read_text())
    assert {row["key"] for row in manifest["edits"]} >= {"ppo.gamma", "data.costs.fee_bps"}
    assert all(row["step"] == 128 for row in manifest["edits"])
    go_on("first", "live")
    assert "was edited" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("policy_kwargs__lstm_hidden_size", 9), ("policy_kwargs__net_arch__pi", [9]), ("policy", "MlpPolicy")),
        *(("n_envs", 5), ("seed", 7), ("ppo__critic__n_quantiles", 9), ("ppo__optimizer", "adamw")),
        *(("data__train", 0.5), ("data__features", ["return_1"]), ("data__account__initial_cash", 5.0)),
    ],
)
def test_what_cannot_change_is_refused_by_its_key_and_nothing_is_touched(key, value, first, capsys):
    if key == "policy":
        edit(first, policy_kwargs__lstm_hidden_size=64)  # the default: MlpPolicy takes no width of a memory
    edit(first, **{key: value})
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file() and path.name != "lock"}
    named = "policy" if key == "policy" else key.replace("__", ".")
    for use in (lambda: go_on("first", "live"), lambda: examine(first), lambda: attack_run(first, AttackConfig())):
        with pytest.raises(ConfigError, match=rf"config\.yaml: {named}") as refused:
            use()
        assert "cannot change" in str(refused.value)
        assert "Set it back" in str(refused.value)
    after = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


def test_a_folder_of_an_earlier_version_is_compared_with_its_checkpoint(first, capsys):
    """Its manifest does not hold the configuration; nothing of the learner is missed all the same."""
    manifest = json.loads(first.manifest_file.read_text())
    first.manifest_file.write_text(json.dumps({key: value for key, value in manifest.items() if key != "config"}))
    go_on("first", "live")
    assert "was edited" not in capsys.readouterr().out
    assert json.loads(first.manifest_file.read_text())["config"] == manifest["config"]
    edit(first, n_envs=5)
    with pytest.raises(ConfigError, match="n_envs is 5, but the agent of step-128 was trained with 4"):
        go_on("first", "quiet")


def test_an_evaluation_says_what_it_takes_from_where(first):
    digest = examine(first).subject.config
    edit(first, ppo__gamma=0.5)
    with pytest.warns(UserWarning, match=r"ppo\.gamma: the agent was trained with 0\.\d+, which is what counts"):
        found = examine(first)
    assert found.subject.gamma == said_by(first)["gamma"] != 0.5
    assert found.subject.config == digest  # the trial is that of the agent, not of the edit
    edit(first, ppo__gamma=said_by(first)["gamma"], data__costs__fee_bps=30.0, steps=1_000)
    with pytest.warns(
        UserWarning, match=r"data\.costs\.fee_bps: config\.yaml was edited to 30\.0, which is taken"
    ) as said:
        found = examine(first)
    assert len(said) == 1  # more steps are no matter of an evaluation
    assert found.costs.fee_bps == 30.0


def test_an_attack_says_so_too(first):
    edit(first, ppo__gamma=0.5)
    with pytest.warns(UserWarning, match=r"ppo\.gamma: the agent was trained with"):
        attack_run(first, AttackConfig(attacks=("random",), epsilons=(0.1,), seeds=1, episodes=2))


def test_bars_that_changed_in_their_file_are_not_taken_for_those_of_the_training(first, tmp_path):
    write(tmp_path / "bars.csv", 800)
    with pytest.raises(DataError, match=r"are not those that .* was begun with.*--data bars.csv"):
        examine(first)
    assert examine(first, files=["bars.csv"]).subject.split == "new-bars"


def test_files_that_moved_are_the_same_bars(first, tmp_path, capsys):
    (tmp_path / "bars.csv").rename(tmp_path / "moved.csv")
    edit(first, data__files=["moved.csv"], steps=256)
    go_on("first", "live")
    said = capsys.readouterr().out
    assert "data.files = ['moved.csv']" in said
    assert first.steps()[-1] == 256
    assert len(examine(first).strategy) > 0


def test_before_the_first_checkpoint_anything_may_be_edited(first, capsys):
    for step in first.steps():
        for file in sorted(first.checkpoint(step).iterdir()):
            file.unlink()
        first.checkpoint(step).rmdir()
    edit(first, policy_kwargs__lstm_hidden_size=9, data__features=["return_1"], ppo__gamma=0.5)
    go_on("first", "live")
    said = capsys.readouterr().out
    assert sum("was edited" in line for line in said.splitlines()) == 3
    assert said_by(first)["gamma"] == 0.5
    assert len(examine(first).strategy) > 0  # the scaler is that of the new features


def test_runs_that_are_trained_alike_name_what_differs(tmp_path):
    """Seeds and folds: the folder's file and the agent in it are both compared with what is asked for."""
    experiment = tiny_experiment("cartpole", updates=2)
    folder = RunFolder(tmp_path / "seed-0")
    train_tiny(folder, experiment)
    other = type(experiment)(
        experiment_config(experiment.config.model_dump(mode="json"), ["ppo.gamma=0.5", "steps=512"])
    )
    with pytest.raises(ConfigError, match=r"ppo\.gamma is .* there and 0\.5 here"):
        begin(folder, other, [])
    folder.config_file.write_text(other.config.to_yaml())  # and now the file was edited too
    with folder.lock(), pytest.raises(ConfigError, match=r"agent of other settings: ppo\.gamma was"):
        trained_to_the_end(other, folder, lambda: None, other.training_env)


# every setting of the learner


def leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, another value) of settings, as far as their types say what else they could be."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        kinds = [field.annotation, *get_args(field.annotation)]
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        elif choices:
            yield from ((prefix + name, choice) for choice in choices if choice != value)
        elif isinstance(value, bool):
            yield prefix + name, not value
        elif isinstance(value, int):
            yield prefix + name, 2 * value if value else 4
        elif isinstance(value, float):
            yield prefix + name, 0.5 * value if value else 0.01


MORE = [
    *(("target_kl", 0.02), ("batch_size", 64), ("microbatch_size", 32), ("critic.value_clip", 0.2)),
    *(("vgs", {"alpha": 0.3}), ("adversary", {"epsilon": 0.1}), ("kl_penalty.target", 0.02), ("torch_threads", 2)),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("trained") / "run")
    train_tiny(folder, tiny_experiment("cartpole", updates=2))
    return folder


def test_every_setting_of_the_learner_is_refused_by_its_key_or_trained_with(trained):
    """No third way: what is not refused is in the agent that goes on, in its next bundle, and lets it train."""
    experiment = tiny_experiment("cartpole", updates=2)
    refused, taken = [], []
    for path, value in [*leaves(experiment.config.ppo), *MORE]:
        if path == "learning_rate" or path.startswith("torch_threads"):
            continue
        tree: Any = {path.split(".")[-1]: value}
        for name in reversed(path.split(".")[:-1]):
            tree = {name: tree}
        try:
            config = experiment_config({**saved_tree(trained), "ppo": merged_tree(saved_tree(trained)["ppo"], tree)})
        except (InertSettingError, ConfigError):
            continue  # it cannot be written
        if config.ppo == experiment.config.ppo:
            continue
        settings, refusal = answered(ConfigEdits(trained, config), trained.last_checkpoint())
        if refusal:
            assert f"ppo.{path}" in refusal
            refused.append(path)
            continue
        assert settings, path
        agent = DistributionalPPO.resume(trained.last_checkpoint(), experiment.training_env(), **settings)
        assert agent.config == config.ppo, path
        agent.learn(STEPS_PER_UPDATE, reset_num_timesteps=False)
        assert agent.num_timesteps == 3 * STEPS_PER_UPDATE
        taken.append(path)
    print(f"taken over: {taken}\nrefused: {refused}")
    assert {"gamma", "n_epochs", "clip_range", "ent_coef", "vf_coef", "gae_lambda", "critic.huber_kappa"} <= set(taken)
    assert {"optimizer", "critic.kind", "critic.twin", "critic.n_quantiles", "n_steps"} <= set(refused)
    assert len(taken) > 15


def answered(edits: ConfigEdits, checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The settings to resume with, or the refusal."""
    try:
        return edits.settings_for(checkpoint), ""
    except ConfigError as error:
        return {}, str(error)


def saved_tree(folder: RunFolder) -> dict[str, Any]:
    return saved_experiment(folder.config_file).model_dump(mode="json")


def merged_tree(base: Any, over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`; a value that replaces None stands alone."""
    out = dict(base)
    for key, value in over.items():
        out[key] = merged_tree(out[key], value) if isinstance(out.get(key), dict) and isinstance(value, dict) else value
    return out


def test_reasons_are_about_settings_that_exist() -> None:
    """A renamed setting would otherwise silently become one that can change."""
    from tailguard.config_edits import FIXED, LIVE, OF_TRAINING, Edit
    from tailguard.experiment import ExperimentConfig

    for key in (*FIXED, *LIVE, *OF_TRAINING):
        kind: Any = ExperimentConfig
        for name in key.split("."):
            assert name in kind.model_fields, key
            inner = (kind.model_fields[name].annotation, *get_args(kind.model_fields[name].annotation))
            kind = next((part for part in inner if isinstance(part, type) and issubclass(part, BaseModel)), None)
    assert reason_against(Edit("ppo.gamma", 0.9, 0.8)) is None
    assert reason_against(Edit("ppo.risk.weight", 0.5, None)) is not None
    assert PPOConfig().gamma == 0.99


def test_a_run_that_was_not_edited_says_nothing(trained: RunFolder, tmp_path: Path) -> None:
    edits = ConfigEdits(trained, saved_experiment(trained.config_file))
    assert edits.settings_for(trained.last_checkpoint()) == {}
    assert edits.edits == []
