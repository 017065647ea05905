"""`tailguard attack`: from a run to curves, JSON and the picture in its report; refusals with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_train import SMALL, tailguard

__all__ = ["tailguard"]

QUICK = ("--seeds", "1", "--episodes", "2", "--epsilon", "0.1", "--bps", "5")


def test_a_run_is_attacked_and_its_report_shows_it(tailguard, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tailguard("train", *SMALL, "--run", "first", "--quiet")
    code, out, _ = tailguard("attack", "first", *QUICK)
    assert code == 0
    for words in ("nobody", "price-random", "5 bps", "attack.json", "tailguard evaluate first"):
        assert words in out, words
    tailguard("evaluate", "first")
    assert "attacks-bps" in (tmp_path / "runs" / "first" / "report.html").read_text()
    code, out, _ = tailguard("attack", "first", *QUICK, "--attack", "mad", "--json")
    said = json.loads(out)
    assert code == 0
    assert [curve["name"] for curve in said["curves"]] == ["mad"]
    assert Path(said["record"]).is_file()
    assert "attacks-bps" not in (tmp_path / "runs" / "first" / "report.html").read_text()  # rewritten


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--attack", "mda"), 'Did you mean "mad"'),
        (("--epsilon", "small"), "give numbers"),
        (("--epsilon", "-1"), "epsilons"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, message, tailguard) -> None:  # type: ignore[no-untyped-def]
    tailguard("train", *SMALL, "--run", "first", "--quiet")
    code, _, err = tailguard("attack", "first", *arguments)
    assert code == 2
    assert message in err


def test_an_unknown_run_is_named(tailguard) -> None:  # type: ignore[no-untyped-def]
    code, _, err = tailguard("attack", "nowhere")
    assert code == 2
    assert "nowhere" in err
