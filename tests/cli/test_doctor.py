"""`tailguard doctor` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.errors import ConfigError
from tailguard.market.oracles import oracle_market

ENV = "tests.environments:ConstantReward"


def tailguard(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.output


def run(*arguments: str) -> tuple[int, str]:
    return tailguard("doctor", *arguments)


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


PRICES = ("open", "high", "low", "close")
AS_EXPORTED = ("--tz=UTC", "--set=data.repair=[sort]", "--set=data.columns=[ts, open, high, low, close, volume]")
"""What must be said of a file without header and zone, newest first."""
TINY = (
    *("--quiet", "--no-report", "--run=own", "--steps=256", "--set=n_envs=4", "--set=policy_kwargs.lstm_hidden_size=8"),
    *(
        "--set=policy_kwargs.net_arch=[8]",
        "--set=ppo.n_steps=32",
        "--set=ppo.sequence_length=8",
        "--set=ppo.n_epochs=1",
        "--set=ppo.critic.n_quantiles=8",
    ),
)


def exported(file: Path, factor: float = 1.0) -> str:
    """Bars as an exchange's web page gives them; the price of the second half in another unit."""
    bars = oracle_market("signal").bars(1_500, seed=0).frame.select("ts", *PRICES, "volume").with_row_index()
    later = pl.when(pl.col("index") < 750).then(1.0).otherwise(factor)
    bars = bars.with_columns(pl.col("ts").dt.strftime("%Y-%m-%d %H:%M:%S"), *(pl.col(name) * later for name in PRICES))
    bars.drop("index").reverse().write_csv(file, include_header=False)
    return str(file)


def test_every_line_has_a_verdict_on_a_run_of_own_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tailguard("train", "--data", exported(tmp_path / "bars.csv"), *AS_EXPORTED, *TINY) == (0, "")
    code, output = run("own", "--quick", "--json", "v.json")
    lines = json.loads(Path("v.json").read_text())["lines"]
    assert [line for line in lines if line["verdict"]["status"] == "fail"] == []
    assert [line["name"] for line in lines if line["verdict"]["status"] == "n/a"] == [
        *("prices/look_ahead", "prices/fills", "prices/costs")
    ]
    assert code == 0
    assert "1 file, 1,500 rows, errors: none, warnings: none" in " ".join(output.split())


def test_a_file_that_trains_all_the_same_is_named_when_the_data_check_refuses_it(tmp_path: Path) -> None:
    data = {"files": [exported(tmp_path / "bars.csv", factor=10.0)], "tz": "UTC", "repair": ["sort"]}
    config = {"data": {**data, "columns": ["ts", *PRICES, "volume"]}, "n_envs": 4}
    (tmp_path / "own.yaml").write_text(json.dumps(config))
    code, output = run(str(tmp_path / "own.yaml"), "--only", "market/data")
    assert code == 1
    assert "errors: unit_jump" in " ".join(output.split())


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
