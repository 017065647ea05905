"""Cases in processes that are watched: a traceback, a crash, or an answer that comes late is a finding with a number.

A case is a function of (seed, number), so `python -m tests.fuzz --seed S --case N` repeats it alone.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

FINDINGS = ("traceback", "crash", "late", "wrong load")
STARVED = 6
"""Limits of wall time after which an answer is late also when the process had no processor."""
MEMORY = 12 * 2**30
"""Bytes of addresses that a worker may use: what asks for more ends in a MemoryError, not with the machine."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended: loaded, refused early (before or while it was parsed), refused late, or a finding."""

    kind: str
    text: str = ""


@dataclass(frozen=True)
class Surface:
    """One way into the package. `case` does one case in a folder of its own."""

    name: str
    case: Callable[[random.Random, Path], Outcome]


@dataclass(frozen=True)
class Result:
    case: int
    surface: str
    kind: str
    text: str
    seconds: float


class WrongLoad(Exception):  # noqa: N818 (not an error of the program that runs: a finding)
    """Something was accepted that is not what was given."""


def surfaces_in(module: str) -> Sequence[Surface]:
    found: Sequence[Surface] = importlib.import_module(module).SURFACES
    return found


def one_case(surfaces: Sequence[Surface], seed: int, number: int, place: Path) -> Result:
    """Do a case in this process; crashes and endless ones are for who watches it."""
    surface, began = surfaces[number % len(surfaces)], time.monotonic()
    place.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = surface.case(random.Random(f"{seed}/{number}"), place)
    except WrongLoad as wrong:
        outcome = Outcome("wrong load", str(wrong))
    except KeyboardInterrupt:
        raise
    except BaseException:
        outcome = Outcome("traceback", traceback.format_exc())
    return Result(number, surface.name, outcome.kind, outcome.text, time.monotonic() - began)


def work(module: str, seed: int, numbers: Sequence[int]) -> None:
    """A worker: one JSON line per case on standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    surfaces = surfaces_in(module)
    print("ready", file=out, flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        os.chdir(scratch)
        for number in numbers:
            result = one_case(surfaces, seed, number, Path(scratch) / "case")
            print(json.dumps(asdict(result)), file=out, flush=True)


def watched(module: str, seed: int, numbers: Sequence[int], limit_s: float, start_s: float = 120.0) -> Iterator[Result]:
    """Results of some cases; a worker that ends, or is silent for too long, is replaced after the case it was at."""
    rest = list(numbers)
    while rest:
        command = [sys.executable, "-m", "tests.fuzz", "--work", "--module", module, "--seed", str(seed)]
        worker = subprocess.Popen(
            [*command, "--first", str(rest[0]), "--last", str(rest[-1]), "--apart", str(apart(rest))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
        lines: Queue[bytes | None] = Queue()
        said: list[bytes] = []
        readers = [
            threading.Thread(target=pump, args=(worker.stdout, lines.put), daemon=True),
            threading.Thread(target=pump, args=(worker.stderr, said.append), daemon=True),
        ]
        for reader in readers:
            reader.start()
        kind, patience, waited, spent = "", start_s, 0.0, 0.0
        while rest:
            try:
                line = lines.get(timeout=patience)
            except Empty:
                waited += patience
                if waited < STARVED * patience and cpu_seconds(worker.pid) - spent < patience:
                    continue  # the machine is busy with others: it had no chance to answer
                kind = "late"
                break
            if line is None:
                kind = "crash"
                break
            patience, waited, spent = limit_s, 0.0, cpu_seconds(worker.pid)
            if line.strip() != b"ready":
                yield Result(**json.loads(line))
                rest.pop(0)
        worker.kill()
        worker.wait()
        for reader in readers:
            reader.join()
        for stream in (worker.stdout, worker.stderr):
            if stream is not None:
                stream.close()
        if kind and rest:
            words = b"".join(part for part in said if part).decode(errors="replace")[-2000:]
            name = surfaces_in(module)[rest[0] % len(surfaces_in(module))].name
            yield Result(rest.pop(0), name, kind, f"exit code {worker.returncode}\n{words}", limit_s)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def apart(numbers: Sequence[int]) -> int:
    return numbers[1] - numbers[0] if len(numbers) > 1 else 1


def pump(stream: Any, give: Callable[[bytes | None], Any]) -> None:
    for line in stream:
        give(line)
    give(None)


def run(module: str, seed: int, n_cases: int, jobs: int, limit_s: float) -> list[Result]:
    """All cases, shared among workers."""
    results: Queue[Result] = Queue()
    shares = [range(job, n_cases, jobs) for job in range(min(jobs, n_cases))]

    def follow(numbers: Sequence[int]) -> None:
        for result in watched(module, seed, numbers, limit_s):
            results.put(result)

    threads = [threading.Thread(target=follow, args=(share,), daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted((results.get() for _ in range(results.qsize())), key=lambda result: result.case)


def alike(results: Sequence[Result]) -> list[list[Result]]:
    """Findings that end in the same words, the most frequent first."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        places = [line for line in result.text.splitlines() if line.lstrip().startswith("File ")]
        groups.setdefault((result.surface, result.kind, *places[-1:]), []).append(result)
    return sorted(groups.values(), key=len, reverse=True)


def table(results: Sequence[Result], seconds: float) -> str:
    """One row per surface."""
    head = f"{'surface':16} {'cases':>6} {'loaded':>7} {'early':>6} {'late':>6} {'after parsing':>14} {'slowest':>8}"
    rows = [f"{head}  findings"]
    for name in [*dict.fromkeys(result.surface for result in results), "all"]:
        own = [result for result in results if name in (result.surface, "all")]
        kinds = [result.kind for result in own]
        refused = kinds.count("refused early") + kinds.count("refused late")
        share = f"{kinds.count('refused late') / refused:.0%}" if refused else "-"
        found = ", ".join(f"{kinds.count(kind)} {kind}" for kind in FINDINGS if kind in kinds) or "none"
        rows.append(
            f"{name:16} {len(own):6} {kinds.count('loaded'):7} {kinds.count('refused early'):6} "
            f"{kinds.count('refused late'):6} {share:>14} {max(result.seconds for result in own):7.2f}s  {found}"
        )
    return "\n".join([*rows, f"{len(results):,} cases in {seconds:.0f} s"])
