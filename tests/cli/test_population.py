"""`tailguard population`: from a YAML file to a report, and on after a stop."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.cli.population import conclude, table
from tailguard.errors import ConfigError
from tailguard.population.driver import Population
from tailguard.population.history import Finished, ancestry
from tailguard.population.report import member_rows, write_report
from tailguard.population.tasks import InlineExecutor
from tests.cli.test_cli import prices, tailguard, write_bars
from tests.population.tiny import tiny_population


def config_file(folder: Path, rounds: int = 2) -> Path:
    file = folder / "population.yaml"
    file.write_text(tiny_population(rounds).to_yaml())
    return file


def test_the_resolved_configuration_can_be_looked_at_first(tmp_path: Path) -> None:
    arguments = ["population", str(config_file(tmp_path)), "--dry-run", "--set", "ppo.gamma=0.5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "gamma: 0.5" in result.output
    assert "perturbation_interval: 2" in result.output


def test_a_setting_that_does_not_exist_is_one_clear_message(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    file.write_text(file.read_text().replace("name: ent_coef", "name: entcoef"))
    result = CliRunner().invoke(app, ["population", str(file)])
    assert isinstance(result.exception, ConfigError)  # which `main` turns into one line and exit code 2
    assert 'no setting entcoef. Did you mean "ent_coef"?' in str(result.exception)


@pytest.mark.parametrize("command", ["evaluate", "report", "doctor"])
def test_a_population_is_not_taken_for_a_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Population(tiny_population(1), tmp_path / "runs" / "p", InlineExecutor()).write_config()
    (tmp_path / "runs" / "p" / "population.jsonl").touch()
    result = CliRunner().invoke(app, [command, "p"])
    assert isinstance(result.exception, ConfigError)
    assert "is a population, not a run. Its best member is the run p-best" in str(result.exception)


@pytest.mark.parametrize("kind", ["live", "quiet"])
def test_the_end_says_what_to_do_next_and_a_population_without_a_best_has_failed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    population = Population(tiny_population(1), tmp_path / "p", InlineExecutor())
    with pytest.raises(typer.Exit) as end:
        conclude(population, tmp_path / "report.html", "p-best", kind)
    assert end.value.exit_code == 1
    assert "All members failed" in capsys.readouterr().err
    population.run()
    conclude(population, tmp_path / "report.html", "p-best", kind)
    assert ("`tailguard evaluate p-best`" in capsys.readouterr().out) == (kind == "live")


def test_the_report_shows_every_member_every_setting_and_both_pictures(tmp_path: Path) -> None:
    config = tiny_population(2, hyperparams=[{"name": "critic.aggregation", "values": ["mean", "min"]}])
    scheduler = Population(config, tmp_path, InlineExecutor()).run()
    page = write_report(tmp_path, config, scheduler).read_text()
    assert page.count("<svg") == 2
    assert page.count("<tr>") == 1 + 4
    assert "critic.aggregation" in page
    assert scheduler.best is not None
    assert f"Member {scheduler.best.index} is best" in page
    first = (tmp_path / "lineage.svg").read_bytes()
    write_report(tmp_path, config, scheduler)
    assert (tmp_path / "lineage.svg").read_bytes() == first


@pytest.mark.parametrize(
    ("mode", "said"), [("rounds", "round 2 of 2, 8 of 8 segments"), ("asynchronous", "8 of 8 segments")]
)
def test_the_table_shows_every_member_with_its_settings_and_how_its_last_update_went(
    mode: str, said: str, tmp_path: Path
) -> None:
    population = Population(tiny_population(2, mode=mode), tmp_path, InlineExecutor())
    assert [row[-1] for row in member_rows(population.scheduler, population.told)] == ["0"] * 4  # nothing told yet
    population.run()
    console = Console(width=200, file=io.StringIO())
    console.print(table(population))
    page = console.file.getvalue()  # type: ignore[attr-defined]
    assert said in page
    for name in ("member", "score", "learning_rate", "ent_coef", "n_epochs", "parent", "state", "return", "alerts"):
        assert name in page
    assert [" done " in line for line in page.splitlines()].count(True) == 5  # four members and the caption
    for told in population.told.values():
        assert f"{told['metrics']['rollout/ep_rew_mean']:.3g}" in page


def test_the_ancestry_of_a_member_leads_through_every_copy() -> None:
    def segment(member: int, judged: int, source: int | None = None) -> Finished:
        return Finished(member, judged, 0.0, {}, source, 1.0)

    told = [
        *(segment(member, 0) for member in range(3)),
        *(segment(0, 1), segment(1, 1, source=2), segment(2, 1)),
        *(segment(0, 2, source=1), segment(1, 2), segment(2, 2)),
    ]
    assert [(s.member, s.round) for s in ancestry(told, 0)] == [(2, 0), (1, 1), (0, 2)]
    assert [(s.member, s.round) for s in ancestry(told, 2)] == [(2, 0), (2, 1), (2, 2)]
    assert ancestry(told, 9) == []


@pytest.mark.slow
def test_a_population_that_is_told_to_stop_goes_on_with_the_same_command(tmp_path: Path) -> None:
    arguments = ["population", str(config_file(tmp_path, rounds=6)), "--workers", "2", "--run", "p", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tailguard.cli", *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    journal = tmp_path / "runs" / "p" / "population.jsonl"
    until = time.monotonic() + 120.0
    while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "goes on" in said
    result = tailguard("resume", "p", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert sum(line["event"] == "report" for line in lines) == 6 * 4
    assert (tmp_path / "runs" / "p" / "report.html").exists()
    resumed = tailguard("resume", "p-best", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_a_population_on_own_bars_is_scored_on_validation_and_its_best_is_evaluated_on_test(tmp_path: Path) -> None:
    write_bars(tmp_path / "bars.csv", prices(3000))
    file = tmp_path / "population.yaml"
    file.write_text(
        """
data: {files: [bars.csv]}
n_envs: 4
steps: 1024
policy_kwargs: {lstm_hidden_size: 8, net_arch: [8]}
ppo: {n_steps: 64, sequence_length: 16, batch_size: 128}
population:
  population_size: 2
  perturbation_interval: 2
  score_steps: 50
  hyperparams: [{name: learning_rate.start, low: 1e-4, high: 1e-2, log: true}]
"""
    )
    result = tailguard("population", str(file), "--workers", "2", "--run", "own", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "runs" / "own-best" / "trials.jsonl").exists()
    evaluated = tailguard("evaluate", "own-best", cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert len((tmp_path / "runs" / "own-best" / "trials.jsonl").read_text().splitlines()) == 1
