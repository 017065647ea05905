"""`tailguard doctor` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.errors import ConfigError

ENV = "tests.environments:ConstantReward"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.output


def test_a_healthy_environment_ends_with_0_and_writes_its_verdicts(tmp_path: Path) -> None:
    json_file, html_file = tmp_path / "v.json", tmp_path / "v.html"
    code, output = run("--env", ENV, "--only", "environment/", "--json", str(json_file), "--html", str(html_file))
    assert code == 0
    assert "9 passed, 0 failed" in output
    written = json.loads(json_file.read_text())
    assert (written["passed"], written["failed"], written["failures"]) == (9, 0, [])
    lines = written["lines"]
    assert {line["verdict"]["status"] for line in lines} == {"pass"}
    page = html_file.read_text()
    assert "Is a time limit told apart from an end?" in page
    assert "<script" not in page


def test_a_broken_environment_ends_with_1_and_says_what_to_do() -> None:
    code, output = run("--env", "tests.health.test_fault_gallery:TimeLimitAsDeath", "--only", "truncation")
    assert code == 1
    assert "truncated=True" in output
    assert output.rstrip().endswith("failed: environment/truncation")


def test_an_environment_that_can_be_built_on_prices_is_looked_into() -> None:
    code, output = run("--env", "tests.health.test_prices:FilledAtTheCloseSeen", "--only", "prices/")
    assert code == 1
    assert "2 passed, 1 failed, 0 not applicable" in output
    assert "failed: prices/fills" in output


def test_a_configuration_is_examined_before_it_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text("preset: noise\nn_envs: 4\n")
    code, output = run(str(file), "--only", "market/costs")
    assert code == 0
    assert "5.0" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "who is to be examined"),
        (("--env", "nowhere"), "module:function"),
        (("--env", "nowhere:make"), "No module named"),
        (("--env", "json:dumps"), "calling it without arguments failed with TypeError"),
        (("--env", "collections:OrderedDict"), "made a OrderedDict, not a gymnasium.Env"),
        (("--preset", "regime", "--json", "nowhere/v.json"), "no folder nowhere"),
        (("--preset", "regimee"), "regime"),
        (("--preset", "regime", "--only", "nothing"), "No check's name contains"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(*arguments)
