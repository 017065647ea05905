"""J5, K1: a population is a pure function of its configuration, whoever works on it and however often it is stopped."""

from __future__ import annotations

import json
import shutil
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailguard import DistributionalPPO
from tailguard.checkpoint import read_bundle, state_digest
from tailguard.errors import CheckpointError, ConfigError
from tailguard.experiment import GymTask, load_experiment
from tailguard.population import segment as segment_module
from tailguard.population.config import load_population, load_saved_population, population_config
from tailguard.population.driver import Population
from tailguard.population.journal import Journal, event_of, line_of
from tailguard.population.local import LocalExecutor
from tailguard.population.scheduler import Failure, ReadyCheck, Report, RunSegment
from tailguard.population.segment import bundle_name, bundle_path, run_segment, segment_path
from tailguard.population.tasks import InlineExecutor, Outcome
from tailguard.yaml_files import parse_yaml, read_yaml, write_yaml
from tests.population.tiny import digest_of, tiny_population


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A population that ran to its end in one go, and its digest."""
    folder = tmp_path_factory.mktemp("population")
    return folder, digest_of(tiny_population(), folder)


class Stop(Exception):  # noqa: N818
    """The driver goes away in the middle."""


class StoppingExecutor(InlineExecutor):
    """Goes away after some outcomes, or after the work is done and before it can be told."""

    def __init__(self, after: int, unreported: bool) -> None:
        super().__init__()
        self.left, self.unreported = after, unreported

    def wait(self, timeout_s: float) -> list[Outcome]:
        if self.left == 0:
            if self.unreported:
                super().wait(timeout_s)
            raise Stop
        self.left -= 1
        return super().wait(timeout_s)


def lines(folder: Path, event: str = "report") -> list[dict[str, Any]]:
    return [line for line in Journal(folder / "population.jsonl").read() if line["event"] == event]


def test_a_population_trains_judges_copies_and_ends(whole: tuple[Path, str]) -> None:
    reports = lines(whole[0])
    assert len(reports) == 3 * 4
    assert {line["round"] for line in reports} == {0, 1, 2}
    copies = [line for line in reports if line["source"] is not None]
    assert copies
    for copy in copies:
        source = next(r for r in reports if r["round"] == copy["round"] - 1 and r["member"] == copy["source"])
        before = next(r for r in reports if r["round"] == copy["round"] - 1 and r["member"] == copy["member"])
        assert source["score"] > before["score"]
        assert copy["hyperparameters"] != source["hyperparameters"]


def test_the_journal_tells_how_every_segment_went(whole: tuple[Path, str]) -> None:
    for line in lines(whole[0]):
        assert line["step"] == (line["round"] + 1) * 2 * 4 * 32
        assert 0.0 < line["train_cpu_seconds"] <= line["cpu_seconds"]
        assert line["metrics"]["train/learning_rate"] == line["hyperparameters"]["learning_rate"]
        assert {"train/value_loss", "train/explained_variance", "rollout/ep_rew_mean"} <= set(line["metrics"])
        assert isinstance(line["alerts"], dict)


def test_work_that_nobody_heard_of_is_adopted_with_all_it_has_to_tell(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        Population(tiny_population(1), tmp_path, StoppingExecutor(0, unreported=True)).run()
    about = json.loads((segment_path(tmp_path, bundle_name(0, 0)) / "segment.json").read_bytes())
    Population(tiny_population(1), tmp_path, InlineExecutor()).run()
    (adopted,) = (line for line in lines(tmp_path) if line["member"] == 0)
    assert {name: adopted[name] for name in about["told"]} == about["told"]


def test_the_settings_of_a_member_are_those_its_agent_trained_with(whole: tuple[Path, str]) -> None:
    for line in lines(whole[0])[-4:]:
        _, manifest = read_bundle(bundle_path(whole[0], line["bundle"]))
        for name, value in line["hyperparameters"].items():
            assert manifest["config"][name] == value
        assert manifest["num_timesteps"] == 3 * 2 * 4 * 32


def test_the_rate_falls_over_the_whole_training_not_over_a_segment(tmp_path: Path) -> None:
    space = [{"name": "learning_rate.start", "low": 1e-3, "high": 1e-2}]
    config = tiny_population(ppo={"learning_rate": {"start": 2e-3}}, hyperparams=space, population_size=1)
    Population(config, tmp_path, InlineExecutor()).run()
    segments = lines(tmp_path)
    tree, _ = read_bundle(bundle_path(tmp_path, segments[-1]["bundle"]))
    assert tree["parts"]["progress"]["progress_remaining"] == 0.0
    # of the last update of each segment, read after its rollout
    rates = [s["metrics"]["train/learning_rate"] / s["hyperparameters"]["learning_rate.start"] for s in segments]
    assert rates == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert tree["parts"]["progress"]["_total_timesteps"] == config.total_steps


def test_only_bundles_that_can_still_be_asked_for_are_kept(whole: tuple[Path, str]) -> None:
    kept = {f"{place.parent.name}/{place.name}" for place in (whole[0] / "bundles").glob("*/*")}
    assert kept == {bundle_name(member, 2) for member in range(4)}


def test_the_best_member_is_an_ordinary_run(whole: tuple[Path, str]) -> None:
    best = whole[0].with_name(f"{whole[0].name}-best")
    reports = [line for line in lines(whole[0]) if line["round"] == 2]
    winner = max(reports, key=lambda line: (line["score"], -line["member"]))
    config = load_experiment(best / "config.yaml")
    assert config.ppo.learning_rate == winner["hyperparameters"]["learning_rate"]
    (checkpoint,) = (best / "checkpoints").iterdir()
    agent = DistributionalPPO.load(checkpoint)
    assert agent.num_timesteps == config.steps == 768
    assert json.loads((best / "manifest.json").read_text())["member"] == winner["member"]


@pytest.mark.parametrize("unreported", [False, True], ids=["between two events", "with work that nobody heard of"])
def test_a_driver_that_goes_away_at_any_moment_resumes_to_the_same_population(
    unreported: bool, whole: tuple[Path, str], tmp_path: Path
) -> None:
    config = tiny_population()
    for after in (0, 1, 3, 4, 2, 0):
        with pytest.raises(Stop):
            Population(config, tmp_path, StoppingExecutor(after, unreported)).run()
    assert digest_of(config, tmp_path) == whole[1]
    assert digest_of(config, tmp_path) == whole[1]  # a finished population has nothing left to do


def test_local_processes_give_the_same_population(whole: tuple[Path, str], tmp_path: Path) -> None:
    assert digest_of(tiny_population(), tmp_path, LocalExecutor(2, 600.0, tmp_path / "logs")) == whole[1]


def test_outcomes_that_come_at_the_same_moment_lose_no_bundle(whole: tuple[Path, str], tmp_path: Path) -> None:
    class Together(InlineExecutor):
        """Tells of all its work at once, as two processes do that end within the same wait."""

        def wait(self, timeout_s: float) -> list[Outcome]:
            return [outcome for _ in range(len(self.tasks)) for outcome in super(Together, self).wait(timeout_s)]

    assert digest_of(tiny_population(), tmp_path, Together()) == whole[1]
    assert not lines(tmp_path, "failure")


def test_another_seed_gives_another_population(whole: tuple[Path, str], tmp_path: Path) -> None:
    assert digest_of(tiny_population(seed=1), tmp_path) != whole[1]


def begun(folder: Path) -> RunSegment:
    """The first segment of a population that is otherwise not run."""
    config = tiny_population()
    population = Population(config, folder, InlineExecutor())
    population.write_config()
    command = population.scheduler.start()[0]
    assert isinstance(command, RunSegment)
    return command


def test_a_segment_done_twice_gives_the_same_bits_and_is_not_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    reports = [run_segment(folder, begun(folder)) for folder in (first, second)]
    assert reports[0] == reports[1]
    assert reports[0].bundle is not None
    files = [read_bundle(bundle_path(folder, reports[0].bundle))[1]["files"] for folder in (first, second)]
    assert files[0] == files[1]
    monkeypatch.setattr(segment_module, "train", lambda *_: pytest.fail("trained again"))
    assert run_segment(first, begun(first)) == reports[0]


def test_a_damaged_segment_is_done_again(tmp_path: Path) -> None:
    segment = begun(tmp_path)
    report = run_segment(tmp_path, segment)
    assert report.bundle is not None
    place = bundle_path(tmp_path, report.bundle) / "state.safetensors"
    place.write_bytes(place.read_bytes()[:-1] + b"\x01")
    assert run_segment(tmp_path, segment) == report
    read_bundle(bundle_path(tmp_path, report.bundle))


def test_a_segment_of_other_inputs_under_the_same_name_is_replaced(tmp_path: Path) -> None:
    segment = begun(tmp_path)
    run_segment(tmp_path, segment)
    about = segment_path(tmp_path, bundle_name(0, 0)) / "segment.json"
    about.write_text(about.read_text().replace(f'"seed": {segment.seed}', '"seed": 1'))
    run_segment(tmp_path, segment)
    assert json.loads(about.read_text())["inputs"]["seed"] == segment.seed


def test_training_that_diverges_scores_worst_and_its_member_is_replaced(tmp_path: Path) -> None:
    space = [{"name": "learning_rate", "values": [1e-3, 1e30], "resample_probability": 1.0}]
    config = tiny_population(hyperparams=space, rounds=2)
    strict = config.experiment.ppo.replace(max_skipped_steps=1)
    config = config.replace(experiment=config.experiment.replace(ppo=strict))
    scheduler = Population(config, tmp_path, InlineExecutor()).run()
    first = [line for line in lines(tmp_path) if line["round"] == 0]
    diverged = {line["member"] for line in first if line["score"] is None}
    assert diverged == {line["member"] for line in first if line["hyperparameters"]["learning_rate"] == 1e30}
    assert 0 < len(diverged) < 4
    assert all(line["source"] not in {None, *diverged} for line in lines(tmp_path)[4:] if line["member"] in diverged)
    assert scheduler.best is not None


def test_a_member_that_always_fails_is_given_up_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unlucky(InlineExecutor):
        def wait(self, timeout_s: float) -> list[Outcome]:
            if self.tasks and self.tasks[0].key.startswith("1/"):
                return [Outcome(self.tasks.popleft().key, None, "no luck")]
            return super().wait(timeout_s)

    scheduler = Population(tiny_population(rounds=2, max_failures=1), tmp_path, Unlucky()).run()
    assert [member.state for member in scheduler.members] == ["done", "dead", "done", "done"]
    assert [line["reason"] for line in lines(tmp_path, "failure")] == ["no luck"] * 2
    said = [record.getMessage() for record in caplog.records]
    assert said.count("Member 1 is given up after 2 attempts.") == 1


def test_another_configuration_in_the_same_folder_is_refused(whole: tuple[Path, str]) -> None:
    with pytest.raises(ConfigError, match="another configuration"):
        Population(tiny_population(rounds=4), whole[0], InlineExecutor()).run()


def test_a_configuration_edited_under_way_is_refused_by_its_key_unless_it_is_patience(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Stop):
        Population(tiny_population(), tmp_path, StoppingExecutor(2, False)).run()
    file = tmp_path / "config.yaml"
    begun, edited = file.read_text(), read_yaml(file)
    edited["ppo"]["gamma"] = 0.5
    file.write_text(write_yaml(edited))
    with pytest.raises(ConfigError, match=r"cannot change under way: ppo\.gamma was .* and is 0\.5"):
        Population(load_saved_population(file), tmp_path, InlineExecutor()).run()
    edited = parse_yaml(begun, "config.yaml")
    edited["population"]["hang_timeout_s"] = 99.0
    file.write_text(write_yaml(edited))
    assert Population(load_saved_population(file), tmp_path, InlineExecutor()).run().finished
    assert any("population.hang_timeout_s was" in record.getMessage() for record in caplog.records)


def test_events_come_back_from_the_journal_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "population.jsonl")
    events = [Report(1, 2, 0.1 + 0.2, "x"), Failure(0, 1, 2, "reason"), ReadyCheck()]
    for event in events:
        journal.append(event, time=1.0)
    assert journal.events() == events
    worst = event_of(json.loads(json.dumps(line_of(Report(0, 0, float("nan"), None)))))
    assert isinstance(worst, Report)
    assert isnan(worst.score)


def test_a_torn_last_line_never_happened_and_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "population.jsonl")
    journal.append(ReadyCheck())
    with journal.path.open("ab") as file:
        file.write(b'{"event": "rep')
    assert journal.events() == [ReadyCheck()]
    journal.append(Failure(0, 0, 0, ""))
    assert journal.events() == [ReadyCheck(), Failure(0, 0, 0, "")]
    journal.path.write_bytes(b"not json\n")
    with pytest.raises(CheckpointError, match="damaged"):
        journal.events()


def test_a_configuration_comes_back_from_its_yaml(whole: tuple[Path, str]) -> None:
    assert load_population(whole[0] / "config.yaml") == tiny_population()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "regime"}, "needs a `population` section"),
        ({"preset": "regime", "population": {"hyperparams": [{"name": "gama", "low": 0.1, "high": 0.2}]}}, "gamma"),
        ({"preset": "regime", "population": {"hyperparams": [], "size": 3}}, "no setting 'size'"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        population_config(given)


def test_overrides_reach_both_halves() -> None:
    config = tiny_population()
    given = {**config.experiment.model_dump(mode="json"), "population": config.population.model_dump(mode="json")}
    changed = population_config(given, ["ppo.gamma=0.5", "population.max_failures=7"])
    assert (changed.experiment.ppo.gamma, changed.population.max_failures) == (0.5, 7)


def test_leftovers_of_a_crash_are_removed(whole: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "population"
    shutil.copytree(whole[0], folder)
    (folder / "bundles" / "member-00" / ".segment-abc").mkdir()
    assert digest_of(tiny_population(), folder) == whole[1]
    assert not list((folder / "bundles").glob("*/.*"))


def test_segments_continue_exactly_so_their_length_changes_nothing(tmp_path: Path) -> None:
    given = {
        "preset": "regime",
        "n_envs": 4,
        "steps": 4 * 4 * 16,
        "policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]},
        "ppo": {"n_steps": 16, "sequence_length": 8, "batch_size": 32, "critic": {"n_quantiles": 8}},
    }
    digests = []
    for interval in (1, 4):
        population = {"population_size": 1, "perturbation_interval": interval, "score_steps": 10}
        space = [{"name": "learning_rate.start", "low": 1e-3, "high": 1e-2}]
        config = population_config({**given, "population": {**population, "hyperparams": space}})
        folder = tmp_path / str(interval)
        best = Population(config, folder, InlineExecutor()).run().best
        assert best is not None
        assert best.bundle is not None
        digests.append(state_digest(read_bundle(bundle_path(folder, best.bundle))[0]["parts"]))
    assert digests[0] == digests[1]


def test_a_validation_scores_what_predict_would_earn(tmp_path: Path) -> None:
    segment = begun(tmp_path)
    report = run_segment(tmp_path, segment)
    assert report.bundle is not None
    agent = DistributionalPPO.load(bundle_path(tmp_path, report.bundle))
    env = GymTask("CartPole-v1").validation_env(4, seed=0)
    env.seed(0)
    observations, state, starts = env.reset(), None, np.ones(4, np.bool_)
    total, n_episodes = 0.0, 0
    for _ in range(50):
        n_episodes += int(starts.sum())
        actions, state = agent.predict(observations, state, starts, deterministic=True)
        observations, rewards, starts, _ = env.step(actions)
        total += float(rewards.sum())
    assert report.score == pytest.approx(total / n_episodes)


def test_asynchronous_members_all_take_their_segments(tmp_path: Path) -> None:
    scheduler = Population(tiny_population(rounds=3, mode="asynchronous"), tmp_path, InlineExecutor()).run()
    assert [member.segments for member in scheduler.members] == [3] * 4
    assert any(line["source"] is not None for line in lines(tmp_path))
    assert scheduler.best is not None
