"""Hand-edited journals and records: an error that names file, line and field, or a resume to a whole population."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tailguard.errors import TailguardError
from tailguard.population.driver import Population
from tailguard.population.journal import Journal
from tailguard.population.tasks import InlineExecutor
from tests.population.tiny import digest_of, tiny_population

CONFIG = tiny_population(rounds=3, population_size=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A population of two members and three rounds."""
    place = tmp_path_factory.mktemp("journal") / "p"
    digest_of(CONFIG, place)
    return place


def restarted(whole: Path, place: Path, journal: bytes) -> Population:
    """A driver that has replayed an edited journal, before it begins any segment."""
    shutil.copytree(whole, place)
    (place / "population.jsonl").write_bytes(journal)
    return replayed(place)


def replayed(place: Path) -> Population:
    """A driver that has replayed the journal in a folder, before it begins any segment."""
    population = Population(CONFIG, place, InlineExecutor())
    try:
        population.restart()
    finally:
        if "records" in vars(population):
            population.records.close()
    return population


def lines_of(whole: Path) -> list[bytes]:
    return (whole / "population.jsonl").read_bytes().splitlines(keepends=True)


def edited(line: bytes, /, **changes: Any) -> bytes:
    return json.dumps({**json.loads(line), **changes}).encode() + b"\n"


def without(line: bytes, name: str) -> bytes:
    return json.dumps({key: value for key, value in json.loads(line).items() if key != name}).encode() + b"\n"


def first_report(lines: list[bytes]) -> int:
    return next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "report")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "high"}, "score is 'high'; expected a number or null"),
        ({"score": 10**400}, "is too large"),
        ({"member": 7}, "member is 7, and the last of the population is 1"),
        ({"member": -1}, "member is '-1'; expected a whole number from 0"),
        ({"member": True}, "member is 'True'"),
        ({"round": 99}, "round is 99, and the last one is 2"),
        ({"round": 0.5}, "round is '0.5'"),
        ({"event": "repart"}, "event is 'repart'; expected one of report, failure"),
        ({"event": ["report"]}, "expected text"),
        ({"bundle": "../../etc"}, "bundle is '../../etc', and this segment writes 'member-0"),
        ({"bundle": 3}, "bundle is '3'; expected text"),
        ({"bundle": None}, "bundle is null beside the score"),
        ({"figures": {"a": "b"}}, "figures is .*; expected an object of numbers"),
        ({"alerts": [1]}, "alerts is .*; expected an object"),
        (
            {"hyperparameters": {"learning_rate": 1.0}},
            "hyperparameters has ent_coef=None, and the lines before it give",
        ),
        ({"hyperparameters": {"learning_rate": [1]}}, "hyperparameters is .*; expected an object of numbers, words"),
        ({"source": "nobody"}, "source is 'nobody'; expected a whole number"),
        ({"seconds": None}, "seconds is 'None'; expected a number"),
        ({"metrics": {"train/kl": "x"}}, "metrics is .*; expected an object of numbers"),
        ({"line": 9}, "says that it is line 9: lines were lost, moved or added"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_with_its_line(
    whole: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    lines = lines_of(whole)
    at = first_report(lines)
    lines[at] = edited(lines[at], **changes)
    with pytest.raises(TailguardError, match=message) as refusal:
        restarted(whole, tmp_path / "p", b"".join(lines))
    assert f"line {at + 1}" in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["score", "member", "round", "bundle", "event", "hyperparameters", "source", "seconds"]
)
def test_a_field_that_is_missing_is_named_with_its_line(whole: Path, tmp_path: Path, name: str) -> None:
    lines = lines_of(whole)
    at = first_report(lines)
    lines[at] = without(lines[at], name)
    with pytest.raises(TailguardError, match=rf"line {at + 1} has no '{name}'"):
        restarted(whole, tmp_path / "p", b"".join(lines))


@pytest.mark.parametrize("edit", ["lost", "twice", "moved", "blank", "not json", "key twice", "NaN", "nested", "bytes"])
def test_lines_that_are_not_as_written_are_named(whole: Path, tmp_path: Path, edit: str) -> None:
    lines = lines_of(whole)
    at = first_report(lines)
    line = lines[at].rstrip()
    lines[at : at + 2] = {
        "lost": lines[at + 1 : at + 2],
        "twice": [lines[at - 1], lines[at], lines[at + 1]],
        "moved": [lines[at + 1], lines[at]],
        "blank": [b"\n", lines[at], lines[at + 1]],
        "not json": [b"{,\n", lines[at + 1]],
        "key twice": [line[:-1] + b', "score": 1.0}\n', lines[at + 1]],
        "NaN": [line[:-1] + b', "more": NaN}\n', lines[at + 1]],
        "nested": [b"[" * 100_000 + b"\n", lines[at + 1]],
        "bytes": [b"\xff\xfe\n", lines[at + 1]],
    }[edit]
    with pytest.raises(TailguardError, match=rf"population.jsonl, line {at + 1}"):
        restarted(whole, tmp_path / "p", b"".join(lines))


def test_a_journal_of_an_earlier_version_has_no_numbers_of_lines_and_goes_on(whole: Path, tmp_path: Path) -> None:
    lines = [without(line, "line") for line in lines_of(whole)]
    population = restarted(whole, tmp_path / "p", b"".join(lines))
    assert population.scheduler.finished
    assert json.loads(lines_of(tmp_path / "p")[-1])["line"] == len(lines) + 1  # that it goes on


def test_a_score_that_its_segment_does_not_know_is_named(whole: Path, tmp_path: Path) -> None:
    lines = lines_of(whole)
    lines[-1] = edited(lines[-1], score=123.0)
    with pytest.raises(TailguardError, match=rf"line {len(lines)}: score is 123.0, and the segment's own record says"):
        restarted(whole, tmp_path / "p", b"".join(lines))


def test_a_bundle_that_was_removed_is_named_before_anybody_fails_at_it(whole: Path, tmp_path: Path) -> None:
    lines = lines_of(whole)
    last = max(i for i, line in enumerate(lines) if json.loads(line)["event"] == "report")
    shutil.copytree(whole, tmp_path / "p")
    shutil.rmtree(tmp_path / "p" / "bundles")
    (tmp_path / "p" / "population.jsonl").write_bytes(b"".join(lines[:last]))
    with pytest.raises(TailguardError, match=r"agent is missing, and member \d goes on from it in round"):
        replayed(tmp_path / "p")


def test_random_edits_are_refused_or_leave_a_journal_that_says_the_same(whole: Path, tmp_path: Path) -> None:
    journal, rng, said = b"".join(lines_of(whole)), random.Random(0), list[str]()
    place = tmp_path / "p"
    shutil.copytree(whole, place)
    for _ in range(150):
        at = rng.randrange(len(journal))
        cut = journal[at : at + rng.randint(1, 8)]
        mutant = (
            journal[:at] + rng.choice([b"", b"0", b'"', b"}", b"9" * 30, cut[::-1], b"\n"]) + journal[at + len(cut) :]
        )
        (place / "population.jsonl").write_bytes(mutant)
        try:
            replayed(place)
        except TailguardError as error:
            said.append(str(error))
    assert len(said) > 75
    assert not [text for text in said if "journal" not in text and "population.jsonl" not in text]


def test_appending_goes_on_counting_where_the_file_ends(tmp_path: Path) -> None:
    for _ in range(3):
        Journal(tmp_path / "population.jsonl").append("start")
    assert [line["line"] for line in Journal(tmp_path / "population.jsonl").read()] == [1, 2, 3]
