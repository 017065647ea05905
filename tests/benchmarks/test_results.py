"""RESULTS.md: sections are replaced whole, and a table that is measured in parts keeps its other rows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import kept_rows, markdown_table, write_section


def test_a_section_is_replaced_and_its_neighbours_stay(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for name, body in (("one", "first"), ("two", "second"), ("one", "third")):
        write_section(name, name, f"run {name}", body, path)
    text = path.read_text()
    assert "first" not in text
    assert text.index("third") < text.index("second")
    assert text.count("<!-- section:one -->") == 1


def test_rows_that_are_not_measured_anew_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    table = markdown_table(["name", "value"], [["a", "1"], ["b", "2"], ["of another table", "2", "3"]])
    write_section("part", "Part", "run", f"Words first.\n\n{table}", path)
    assert kept_rows("part", [["b", "5"], ["c", "6"]], path) == [["a", "1"], ["b", "5"], ["c", "6"]]
    assert kept_rows("nothing yet", [["c", "6"]], path) == [["c", "6"]]
