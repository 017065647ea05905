"""N3: spoiled files and names end in a refusal or are what they seem; `make fuzz` does 20,000 of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.runner import FINDINGS, one_case, run, surfaces_in, table


def test_no_spoiled_file_or_name_ends_in_a_traceback_or_a_wrong_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    surfaces = surfaces_in("tests.fuzz.surfaces")
    results = [one_case(surfaces, 7, number, tmp_path / "case") for number in range(320)]
    found = [(result.case, result.text) for result in results if result.kind in FINDINGS]
    assert not found
    for surface in surfaces:  # every one of them is reached in depth
        kinds = {result.kind for result in results if result.surface == surface.name}
        assert "refused late" in kinds, surface.name
        assert "loaded" in kinds, surface.name


def test_a_case_is_the_same_when_it_is_repeated(tmp_path: Path) -> None:
    surfaces = surfaces_in("tests.fuzz.broken")
    assert len({one_case(surfaces, 3, 5, tmp_path).text for _ in range(3)}) == 1
    assert one_case(surfaces, 3, 5, tmp_path).text != one_case(surfaces, 4, 5, tmp_path).text


def test_crashes_hangs_and_raw_errors_are_found_and_the_rest_is_done() -> None:
    results = run("tests.fuzz.broken", 0, n_cases=10, jobs=2, limit_s=0.5)
    assert [result.case for result in results] == list(range(10))
    assert [result.kind for result in results[:5]] == ["loaded", "traceback", "crash", "late", "wrong load"]
    assert [result.kind for result in results[5:]] == [result.kind for result in results[:5]]
    assert "exit code -11" in results[2].text
    assert "2 traceback, 2 crash, 2 late, 2 wrong load" in table(results, 1.0)
