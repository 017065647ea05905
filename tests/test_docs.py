"""Every Python snippet of README and docs runs by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(page, match.group(1), id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
]


@pytest.mark.parametrize(("page", "code"), SNIPPETS)
def test_a_snippet_runs(page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {"__name__": "snippet"})  # noqa: S102 (our own documentation)


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_proof_of_a_guarantee_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    for row in (line for line in text.splitlines() if line.startswith("| ") and "`tests/" in line):
        page = ""
        for proof in re.findall(r"`((?:tests/|::)[^`]*)`", row):
            page, _, test = (page + proof if proof.startswith("::") else proof).partition("::")
            assert (ROOT / page).exists(), page
            assert not test or f"def {test}(" in (ROOT / page).read_text(), f"{page}::{test}"


def test_excerpts_in_the_style_guide_are_the_code() -> None:
    excerpts = [
        (match.group(1), match.group(2))
        for match in re.finditer(r"^```python\n# (src/\S+)\n(.*?)^```", (ROOT / "STYLE.md").read_text(), re.M | re.S)
    ]
    assert len(excerpts) >= 4
    for path, text in excerpts:
        code = (ROOT / path).read_text()
        for part in re.split(r"^\.\.\.\n", text, flags=re.M):
            assert part.strip("\n") in code, f"{path} no longer reads so:\n{part}"


def test_the_tour_of_the_architecture_names_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().replace("\n", " ")
    source = ROOT / "src" / "tailguard"
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert (source / path).exists(), path
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:,\s+)?)+)", text)
    assert len(named) >= 10
    for path, names in named:
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^ *(def|class) {name}\b", (source / path).read_text(), re.M), f"{path}: {name}"
