"""`tailguard train` and `tailguard resume`: run folders, displays, refusals, and a stop in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailguard.cli import main
from tailguard.run import RunFolder
from tailguard.yaml_files import parse_yaml
from tests.runs import STEPS_PER_UPDATE, whole_state

SMALL = (
    *("--preset", "regime", "--steps", str(4 * STEPS_PER_UPDATE)),
    *(f"--set={setting}" for setting in ("n_envs=4", "ppo.n_steps=32", "ppo.sequence_length=8", "ppo.n_epochs=1")),
    *(f"--set={setting}" for setting in ("policy_kwargs.lstm_hidden_size=8", "checkpoint.every_updates=2")),
)


@pytest.fixture
def tailguard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """The command, in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tailguard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


def test_a_training_leaves_a_whole_run_folder(tailguard, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = tailguard("train", *SMALL, "--seed", "3", "--run", "first")
    assert code == 0
    assert "trained 512 steps" in out
    assert "steps" in out
    folder = RunFolder(tmp_path / "runs" / "first")
    assert {path.name for path in folder.path.iterdir()} == {
        *("config.yaml", "manifest.json", "metrics.jsonl", "alerts.jsonl", "tensorboard", "checkpoints", "lock")
    }
    manifest = json.loads(folder.manifest_file.read_text())
    assert manifest["seed"] == 3
    assert len(manifest["data"]["bars"]) == 64
    assert manifest["versions"]["torch"]
    assert manifest["command"][1:3] == ["train", "--preset"]
    assert folder.steps() == [256, 512]
    assert "seed: 3" in folder.config_file.read_text()


def test_the_configuration_of_a_run_repeats_it(tailguard, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tailguard("train", *SMALL, "--run", "first", "--quiet")
    code, _, err = tailguard("train", "runs/first/config.yaml", "--run", "second", "--quiet")
    assert (code, err) == (0, "")
    states = [whole_state(RunFolder(tmp_path / "runs" / name).last_checkpoint()) for name in ("first", "second")]
    assert states[0] == states[1]


def test_json_lines_are_for_programs_and_quiet_says_nothing(tailguard) -> None:  # type: ignore[no-untyped-def]
    code, out, err = tailguard("train", *SMALL, "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["step"] for line in lines] == [128, 256, 384, 512]
    assert [bool(line["checkpoint"]) for line in lines] == [False, True, False, True]
    assert "trained 512 steps" in err
    assert tailguard("train", *SMALL, "--quiet") == (0, "", "")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["regime-0", "regime-0-2"]


def test_a_dry_run_prints_the_resolved_configuration_and_writes_nothing(tailguard) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = tailguard("train", *SMALL, "--dry-run")
    assert code == 0
    assert "lstm_hidden_size: 8" in out
    assert not Path("runs").exists()


def test_resuming_a_finished_run_says_so_and_an_unknown_one_is_refused(tailguard) -> None:  # type: ignore[no-untyped-def]
    tailguard("train", *SMALL, "--run", "first", "--quiet")
    code, out, _ = tailguard("resume", "first")
    assert code == 0
    assert "trained 512 steps" in out
    code, _, err = tailguard("resume", "frist")
    assert code == 2
    assert err.startswith("tailguard: runs/frist is not a run")
    assert "first" in err
    code, _, err = tailguard("train", *SMALL, "--run", "first")
    assert code == 2
    assert "tailguard resume first" in err


def test_a_failure_in_the_middle_says_how_to_go_on(tailguard, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    from tailguard.env import TradingVecEnv

    real, steps = TradingVecEnv.step_wait, [0]

    def poisoned(self: TradingVecEnv):  # type: ignore[no-untyped-def]
        obs, rewards, dones, infos = real(self)
        steps[0] += 1
        if steps[0] == 80:
            rewards[2] = float("nan")
        return obs, rewards, dones, infos

    monkeypatch.setattr(TradingVecEnv, "step_wait", poisoned)
    code, _, err = tailguard("train", *SMALL, "--run", "first")
    assert code == 2
    assert "reward is nan at step 15 of the rollout in environment 2" in err
    assert "`tailguard resume first` goes on" in err
    assert "Traceback" not in err
    code, out, _ = tailguard("resume", "first")
    assert code == 0
    assert "goes on at step 256" in out


@pytest.mark.slow
def test_a_real_process_stops_on_sigterm_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    arguments = (*SMALL, f"--set=steps={40 * STEPS_PER_UPDATE}", "--json")

    def call(*what: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-m", "tailguard.cli", *what], cwd=tmp_path, text=True, **pipes)

    assert call("train", *arguments, "--run", "whole").communicate()[0].count("\n") == 40
    process = call("train", *arguments, "--run", "cut")
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 0
    assert "SIGTERM: stopping after this update with a checkpoint" in err
    assert "go on with `tailguard resume cut`" in err
    _, err = call("resume", "cut", "--json").communicate()
    assert "trained 5,120 steps" in err
    states = [whole_state(RunFolder(tmp_path / "runs" / name).last_checkpoint()) for name in ("whole", "cut")]
    assert states[0] == states[1]


def test_an_alert_may_end_a_training_with_exit_code_1(tailguard, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    sick = ("--set=policy_kwargs.log_std_init=-6.0", f"--steps={12 * STEPS_PER_UPDATE}")  # it hardly explores
    code, _, said = tailguard("train", *SMALL, *sick, "--run", "sick", "--quiet", "--fail-on-alert")
    assert code == 1
    assert "warn/exploration_collapse" in next(line for line in said.splitlines() if "alerts were raised: " in line)
    assert ", since update 1. A Gaussian policy's spread" in said
    assert tailguard("resume", "sick", "--quiet", "--fail-on-alert")[0] == 1
    assert tailguard("resume", "sick", "--quiet")[0] == 0
    assert "warn/exploration_collapse" in (tmp_path / "runs/sick/alerts.jsonl").read_text()
    assert tailguard("train", *SMALL, "--run", "well", "--quiet", "--fail-on-alert")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2"], "say which with --seeds"),
        (["--ray", "local"], "say which with --seeds"),
        (["--seeds", "0-1", "--seed", "3"], "--seed and --seeds are both given"),
        (["--seeds", "0-1", "--jobs", "0"], "0 workers cannot work"),
    ],
)
def test_options_of_several_seeds_that_cannot_be_meant_are_refused(arguments, message, tailguard):  # type: ignore[no-untyped-def]
    code, _, said = tailguard("train", *SMALL, *arguments)
    assert code == 2
    assert message in said


def test_the_configurations_of_several_seeds_can_be_looked_at_first(tailguard):  # type: ignore[no-untyped-def]
    code, shown, _ = tailguard("train", *SMALL, "--seeds", "3,5", "--dry-run")
    assert code == 0
    assert [parse_yaml(part, "shown")["seed"] for part in shown.split("---\n")] == [3, 5]


@pytest.mark.slow
def test_several_seeds_are_trained_reported_and_refused_under_other_settings(tailguard, tmp_path):  # type: ignore[no-untyped-def]
    command = ("train", *SMALL, "--run", "study", "--seeds", "0-1", "--jobs", "2", "--json")
    code, shown, _ = tailguard(*command)
    assert code == 0
    assert sorted(json.loads(line)["seed"] for line in shown.splitlines()) == [0, 1]
    assert RunFolder(tmp_path / "runs" / "study-seed-1").steps()[-1] == 4 * STEPS_PER_UPDATE
    assert tailguard(*command)[0] == 0  # nothing is left to do
    code, _, said = tailguard(*command, "--set", "ppo.gamma=0.5")
    assert code == 2
    assert "other settings" in said
