"""Independent runs on the executors of populations: the same agents as one by one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tailguard.checkpoint import read_bundle, state_digest
from tailguard.cli.seeds import parsed_seeds
from tailguard.errors import ConfigError
from tailguard.experiment import Experiment
from tailguard.population.local import LocalExecutor
from tailguard.population.runs import seed_tasks
from tailguard.population.tasks import Beat, Executor, InlineExecutor, Outcome, Task, perform, run_all
from tailguard.run import RunFolder, StoppedNow
from tests.population.tiny import tiny_population

CONFIG = tiny_population(2).experiment


def test_every_seed_is_a_run_with_the_agent_that_it_would_be_alone(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    tasks = seed_tasks(CONFIG, [3, 5], tmp_path / "study", ["tailguard", "train"])
    assert run_all(InlineExecutor(), tasks, 0, outcomes.append) == 0
    assert [outcome.key for outcome in outcomes] == ["3", "5"]
    for seed in (3, 5):
        folder = RunFolder(tmp_path / f"study-seed-{seed}")
        together = read_bundle(folder.last_checkpoint())[0]["parts"]["policy"]
        alone = Experiment(CONFIG.replace(seed=seed)).agent().learn(CONFIG.steps)
        assert state_digest(dict(together)) == state_digest(dict(alone.policy.state_dict()))


def policies(place: Path, seeds: list[int], executor: Executor) -> list[str]:
    """Train the seeds on an executor; a digest of the policy of each."""
    try:
        assert run_all(executor, seed_tasks(CONFIG, seeds, place / "study", []), 0, lambda outcome: None) == 0
    finally:
        executor.close()
    folders = [RunFolder(place / f"study-seed-{seed}") for seed in seeds]
    return [state_digest(dict(read_bundle(f.last_checkpoint())[0]["parts"]["policy"])) for f in folders]


@pytest.mark.slow
def test_processes_and_a_ray_cluster_train_the_agents_that_one_process_trains(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tailguard.population.ray_runner import RayExecutor

    alone = policies(tmp_path / "alone", [3, 5], InlineExecutor())
    assert alone[0] != alone[1]
    local = LocalExecutor(2, 600.0, tmp_path / "logs")
    assert policies(tmp_path / "local", [3, 5], local) == alone
    assert policies(tmp_path / "ray", [3, 5], RayExecutor("local", 600.0, tmp_path / "beats", n_cpus=2)) == alone


def test_a_training_that_is_stopped_is_no_result_and_goes_on_to_the_same_agent(tmp_path: Path) -> None:
    whole, stopped = (seed_tasks(CONFIG, [0], tmp_path / name, [])[0] for name in ("whole", "stopped"))
    expected = perform(whole.kind, whole.payload, lambda: None)
    with pytest.raises(StoppedNow):
        perform(stopped.kind, stopped.payload, lambda: os.kill(os.getpid(), signal.SIGTERM))
    found = perform(stopped.kind, stopped.payload, lambda: None)
    assert found["step"] == expected["step"] == CONFIG.steps
    trees = [read_bundle(result["checkpoint"])[0]["parts"] for result in (expected, found)]
    assert state_digest(trees[0]["policy"]) == state_digest(trees[1]["policy"])


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    (task,) = seed_tasks(CONFIG, [0], tmp_path / "study", [])
    RunFolder(task.payload["folder"]).create(CONFIG.replace(steps=7).to_yaml(), {})
    with pytest.raises(ConfigError, match="other settings"):
        perform(task.kind, task.payload, lambda: None)


def test_doing_a_run_again_changes_nothing(tmp_path: Path) -> None:
    (task,) = seed_tasks(CONFIG, [0], tmp_path / "study", [])

    def beat() -> None: ...

    first = perform(task.kind, task.payload, beat)
    files = sorted(tmp_path.rglob("state.safetensors"))
    bits = [file.read_bytes() for file in files]
    assert perform(task.kind, task.payload, beat) == first
    assert [file.read_bytes() for file in files] == bits


def test_a_run_that_fails_is_done_again_and_given_up_after_too_many_failures(tmp_path: Path) -> None:
    class Unlucky(InlineExecutor):
        def wait(self, timeout_s: float) -> list[Outcome]:
            return [Outcome(self.tasks.popleft().key, None, "no luck")]

    outcomes: list[Outcome] = []
    tasks = seed_tasks(CONFIG, [0, 1], tmp_path / "study", [])
    assert run_all(Unlucky(), tasks, 2, outcomes.append) == 2
    assert [outcome.key for outcome in outcomes].count("0") == 3


def test_an_error_in_a_worker_process_is_an_outcome_with_its_reason_and_the_worker_goes_on(tmp_path: Path) -> None:
    executor = LocalExecutor(1, 600.0, tmp_path)
    try:
        for key in ("first", "second"):
            executor.submit(Task(key, "dance", {}))
        outcomes = [outcome for _ in range(2) for outcome in executor.wait(120.0)]
        assert [outcome.key for outcome in outcomes] == ["first", "second"]
        assert all(outcome.result is None and "no kind of task" in outcome.reason for outcome in outcomes)
        assert executor.n_spawned == 1
    finally:
        executor.close()


def test_seeds_are_read_as_lists_and_ranges() -> None:
    assert parsed_seeds("0-2,7") == [0, 1, 2, 7]
    for wrong in ("", "a", "1,1", "3-1"):
        with pytest.raises(ConfigError, match="seeds"):
            parsed_seeds(wrong)


def test_a_task_of_unknown_kind_is_refused() -> None:
    quiet: Beat = lambda: None  # noqa: E731
    with pytest.raises(ConfigError, match="no kind"):
        perform("dance", {}, quiet)
