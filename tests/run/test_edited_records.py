"""Hand-edited records of a run: every reader names file, line and field; a torn last line never happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailguard.errors import DataError, RunError, TailguardError
from tailguard.evaluation import ledger
from tailguard.evaluation.attack_record import AttackRecord, Curve, Point, read_record
from tailguard.evaluation.training_record import TrainingRecord
from tailguard.run import RunFolder
from tailguard.run.records import Records, cut
from tests.evaluation.test_ledger import trial

ROW = {"step": 128, "update": 1, "time": 1.0, "train/kl": 0.01}
DAMAGE = [
    ('{"step": "x"}', r"line 2: step is 'x'; expected a whole number from 0"),
    ('{"update": 3}', "line 2 has no 'step'"),
    ('{"step": 1, "step": 2}', "line 2 is not valid JSON: the key 'step' is given twice"),
    ('{"step": NaN}', "line 2 is not valid JSON: NaN is not a number"),
    ('{"step": 1e999}', "line 2 is not valid JSON: the number 1e999 is too large"),
    ('{"step": 99999999999999999999}', "line 2 is not valid JSON: the number 9+ is too large"),
    ("[1, 2]", r"line 2 holds '\[1, 2\]'; expected an object"),
    ("{", "line 2 is not valid JSON"),
    ('{"step": 1, "train/\\ud800": 1}', "line 2 is not valid JSON"),
    ("[" * 100_000, "line 2 is not valid JSON: it is nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGE, ids=lambda text: text[:40])
@pytest.mark.parametrize("name", ["metrics", "alerts"])
def test_a_damaged_row_is_named_on_resume_and_in_a_report(tmp_path: Path, name: str, line: str, message: str) -> None:
    file = tmp_path / f"{name}.jsonl"
    text = f"{json.dumps(ROW)}\n{line}\n{json.dumps(ROW)}\n"
    file.write_text(text)
    with pytest.raises(RunError, match=message):
        cut(file, 1000)
    assert file.read_text() == text  # nothing was lost
    with pytest.raises(DataError, match=message):
        TrainingRecord.read(tmp_path)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(ROW)}\n{{"step": 12')
    assert TrainingRecord.read(tmp_path).rows == (ROW,)
    assert cut(tmp_path / "metrics.jsonl", 1000) == [ROW]


def test_figures_of_any_size_are_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    row = {**ROW, "a/large": 1e300, "a/int": 2**62, "a/flag": True, "a/none": None, "a/list": [1], "time": None}
    folder.metrics_file.write_text(json.dumps(row) + "\n")
    records = Records(folder, 1000)
    records.close()
    assert len(list(folder.tensorboard.iterdir())) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharpe_per_bar": "x"}, "sharpe_per_bar is 'x'; expected a number"),
        ({"seed": -1}, "seed is '-1'"),
        ({"n_bars": 1.5}, "n_bars is '1.5'"),
        ({"fold": "first"}, "fold is 'first'"),
        ({"data": None}, "data is 'None'; expected text"),
        ({"returns": 3}, "returns is '3'; expected text"),
    ],
    ids=str,
)
def test_a_trial_with_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    ledger.record(tmp_path, trial())
    file = tmp_path / ledger.FILE
    file.write_text(file.read_text() + json.dumps({**json.loads(file.read_text()), **changes}) + "\n")
    with pytest.raises(DataError, match=f"line 2 is not a trial: .*{message}"):
        ledger.read(tmp_path)


def test_a_trial_whose_sharpe_ratio_is_not_known_counts(tmp_path: Path) -> None:
    ledger.record(tmp_path, trial(float("nan")))
    assert len(ledger.read(tmp_path)) == 1


RECORD = AttackRecord(0.05, 1, 2, (Curve("mad", "obs", "…", (Point(0.0, 1.0, 0.5, 0.0, (1.0,)),)),))


@pytest.mark.parametrize(
    ("old", "new"),
    [('"cvar": 0.5', '"cvar": "x"'), ('"points"', '"pints"'), ('"seeds": 1', '"seeds": null'), ("[1.0]", "[{}]")],
)
def test_an_edited_record_of_attacks_is_named(tmp_path: Path, old: str, new: str) -> None:
    from tailguard.robustness.bench import write_record

    file = tmp_path / "attack.json"
    write_record(RECORD, file)
    text = json.dumps(json.loads(file.read_text()))
    file.write_text(text.replace(old, new))
    assert file.read_text() != text
    with pytest.raises(TailguardError, match=r"attack.json is not a record of attacks"):
        read_record(tmp_path)
