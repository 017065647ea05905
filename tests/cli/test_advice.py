"""What the command line answers to usual mistakes: one message whose advice works when it is followed to the letter."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from tailguard.cli import app, main
from tailguard.cli.advice import on_command_line
from tailguard.experiment import saved_experiment
from tailguard.market.oracles import oracle_market
from tailguard.market.problems import PROBLEMS
from tailguard.run import RunFolder
from tests.runs import STEPS_PER_UPDATE

NAMES = ("ts", "open", "high", "low", "close", "volume")


@pytest.fixture
def tailguard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """The command, in this process: (exit code, all that it printed)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tailguard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


def bars(n: int = 3_000) -> pl.DataFrame:
    return oracle_market("regime").bars(n, seed=0).frame.select(*NAMES)


def naive(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("ts").dt.replace_time_zone(None))


def with_hole(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    return frame.with_columns(pl.when(pl.int_range(pl.len()) == 7).then(None).otherwise(name).alias(name))


MISTAKES = {
    "no zone": naive,
    "newest first": lambda frame: frame.reverse(),
    "one stamp twice": lambda frame: pl.concat([frame, frame.tail(1)]),
    "a price is missing": lambda frame: with_hole(frame, "close"),
    "volume is missing": lambda frame: with_hole(frame, "volume"),
    "an odd name": lambda frame: frame.rename({"close": "finish"}),
    "an odd name with a space": lambda frame: frame.rename({"close": "the end"}),
    "stamped at the close": lambda frame: frame.rename({"ts": "close_time"}),
    "swapped volume": lambda frame: frame.with_columns(
        volume=pl.when(pl.int_range(pl.len()) < 900).then(pl.col("volume") * pl.col("close")).otherwise("volume"),
        quote_volume=pl.when(pl.int_range(pl.len()) < 900).then("volume").otherwise(pl.col("volume") * pl.col("close")),
    ),
    "no header": None,
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("command", ["train", "check"])
def test_advice_works_when_it_is_followed_to_the_letter(tailguard, tmp_path, name, command):  # type: ignore[no-untyped-def]
    file = tmp_path / "my bars.csv"
    spoil = MISTAKES[name]
    (bars() if spoil is None else spoil(bars())).write_csv(file, include_header=spoil is not None)
    if spoil is None:  # Unix time, so that nothing else is missing
        bars().with_columns(pl.col("ts").dt.epoch("s")).write_csv(file, include_header=False)
    words = ["data", "check", str(file)] if command == "check" else ["train", "--data", str(file), "--dry-run"]
    code, said = tailguard(*words)
    if name == "swapped volume" and command == "train":
        assert code == 0  # only the check looks for it
        return
    assert code == (2 if command == "train" or "No column" in said else 1), said
    assert not re.search(r"repair=|columns=|stamp=|tz=", said), said
    flags = re.findall(r"--(?:repair \w+|columns (?:'[^']*'|[\w=,]+)|stamp \w+|tz \w+)", said)
    assert flags, said
    code, said = tailguard(*words, *shlex.split(flags[0]))
    assert code == 0, said


def test_the_path_in_advice_is_the_one_of_the_user(tailguard, tmp_path):  # type: ignore[no-untyped-def]
    folder = tmp_path / "far away"
    folder.mkdir()
    with_hole(bars(), "close").write_csv(folder / "bars.csv")
    code, said = tailguard("train", "--data", "far away/bars.csv", "--dry-run")
    assert code == 2
    advised = re.search(r"`tailguard (data check .*?)`", said)
    assert advised is not None
    code, said = tailguard(*shlex.split(advised[1]))
    assert code == 1
    assert "missing_price at line 9" in said


def test_every_fix_of_the_data_check_reads_as_options() -> None:
    for code, problem in PROBLEMS.items():
        text = on_command_line(problem.fix)
        assert not re.search(r"\b(tz|stamp|columns|repair|accept|ambiguous|symbol)=|load_bars", text), (code, text)


def test_settings_are_suggested_with_their_whole_path(tailguard):  # type: ignore[no-untyped-def]
    code, said = tailguard("train", "--preset", "regime", "--dry-run", "--set", "gamma=0.9")
    assert code == 2
    assert "Did you mean 'ppo.gamma'" in said
    code, said = tailguard("train", "--preset", "regime", "--dry-run", "--set", "ppo.risk=3")
    assert code == 2
    assert "expected settings of its own below it" in said


def test_a_value_in_place_of_a_list_is_called_so(tailguard, tmp_path):  # type: ignore[no-untyped-def]
    bars().write_parquet(tmp_path / "bars.parquet")
    code, said = tailguard("train", "--data", "bars.parquet", "--dry-run", "--set", "data.repair=3")
    assert code == 2
    assert "expected a list, such as [first, second]" in said
    assert "tuple" not in said


def test_the_version_is_printed(tailguard):  # type: ignore[no-untyped-def]
    from importlib.metadata import version

    assert tailguard("--version") == (0, f"tailguard {version('tailguard')}\n")


@pytest.mark.parametrize("command", ["population", "walk-forward"])
def test_help_shows_what_is_in_brackets(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"]).output
    assert "tailguard[ray]" in re.sub(r"[\s│]+", "", said)


SMALL = (
    *("--preset", "regime", "--set=n_envs=4", "--set=ppo.n_steps=32", "--set=ppo.sequence_length=8"),
    *("--set=ppo.n_epochs=1", "--set=policy_kwargs.lstm_hidden_size=8"),
)


def test_a_training_says_that_it_goes_by_whole_rollouts_and_is_lengthened_by_resume(tailguard, tmp_path):  # type: ignore[no-untyped-def]
    code, said = tailguard("train", *SMALL, "--steps", "100", "--run", "first")
    assert code == 0
    assert "100 steps are asked for and 128 will be trained, in whole rollouts of 4 x 32 = 128" in said
    folder = RunFolder(tmp_path / "runs" / "first")
    folder.config_file.write_text("# my own words\n" + folder.config_file.read_text())
    code, said = tailguard("resume", "first", "--steps", "128")
    assert code == 2
    assert "has trained 128" in said
    code, said = tailguard("resume", "first", "--steps", str(2 * STEPS_PER_UPDATE), "--quiet")
    assert code == 0, said
    assert folder.steps()[-1] == 2 * STEPS_PER_UPDATE
    assert folder.config_file.read_text().startswith("# my own words\n")
    assert saved_experiment(folder.config_file).steps == 2 * STEPS_PER_UPDATE


def test_a_report_says_which_others_there_are(tailguard, tmp_path):  # type: ignore[no-untyped-def]
    bars().write_parquet(tmp_path / "bars.parquet")
    words = ("--data", "bars.parquet", *SMALL[2:], "--steps", "128", "--run", "first", "--quiet")
    assert tailguard("train", *words)[0] == 0
    assert tailguard("evaluate", "first", "--split", "train")[0] == 0
    code, said = tailguard("report", "first")
    assert code == 0
    assert "report.html" in said
    assert "`tailguard report first --split train`" in said
