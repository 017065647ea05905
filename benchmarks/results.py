"""RESULTS.md, section by section: each benchmark writes its own, with the command and the machine that made it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
PACKAGES = ("torch", "numpy", "stable-baselines3", "sb3-contrib")
HEAD = "# Results\n\nEvery figure here was measured by the command beside it; run it to measure your own.\n"


def parser_of(module: str, words: str | None) -> argparse.ArgumentParser:
    """Arguments of a benchmark that writes its section unless told not to; `words` describe it."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=words)
    parser.add_argument("--dry", action="store_true", help="print the tables without writing RESULTS.md")
    return parser


def publish(name: str, title: str, module: str, body: str, dry: bool) -> None:
    """Show a section and, unless it is dry, write it with the command that this process was started with."""
    print(body)
    if not dry:
        write_section(name, title, " ".join([f"python -m {module}", *sys.argv[1:]]), body)


def write_section(name: str, title: str, command: str, body: str, path: Path = RESULTS) -> None:
    """Replace the section `name`, or add it at the end."""
    begin, end = f"<!-- section:{name} -->", f"<!-- /section:{name} -->"
    section = f"{begin}\n## {title}\n\n`{command}`  \n{machine()}\n\n{body.strip()}\n{end}"
    text = path.read_text() if path.exists() else HEAD
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = text.rstrip("\n") + "\n\n" + section + "\n"
    path.write_text(text)


def kept_rows(name: str, rows: list[list[str]], path: Path = RESULTS) -> list[list[str]]:
    """Rows of the section's last table that are not measured anew, then the new ones; the first cell is the name.

    So a part of a table can be run by itself. Rows of another width belong to an older table and are dropped.
    """
    text = path.read_text() if path.exists() else ""
    section = text.partition(f"<!-- section:{name} -->")[2].partition(f"<!-- /section:{name} -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    new = {row[0] for row in rows}
    return [row for row in old if row[0] not in new and len(row) == len(rows[0])] + rows


def machine() -> str:
    """CPU model, cores and the versions that decide speed and bits."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{cpu_model()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
