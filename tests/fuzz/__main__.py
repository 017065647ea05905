"""`python -m tests.fuzz --cases 20000 --seed 0`: spoiled files and names, and what becomes of them.

A table per surface; `early` is refused before or while it was parsed, `late` after, which are the deep paths. Exit code
1 and the cases, when anything ended in a traceback, a crash, an answer later than the limit, or a wrong load.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.runner import FINDINGS, alike, one_case, run, surfaces_in, table, work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that an answer may take")
    parser.add_argument("--case", type=int, help="repeat one case in this process")
    parser.add_argument("--module", default="tests.fuzz.surfaces", help="where SURFACES are")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    for name in ("--first", "--last", "--apart"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.work:
        work(said.module, said.seed, range(said.first, said.last + 1, said.apart))
        return 0
    if said.case is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            os.chdir(scratch)
            print(one_case(surfaces_in(said.module), said.seed, said.case, Path(scratch)))
        return 0
    began = time.monotonic()
    results = run(said.module, said.seed, said.cases, said.jobs, said.limit)
    found = [result for result in results if result.kind in FINDINGS]
    for same in alike(found):
        first, numbers = same[0], ", ".join(str(result.case) for result in same[:8])
        print(f"--- {first.kind} of {first.surface}, {len(same)} times: cases {numbers}\n{first.text}")
    print(table(results, time.monotonic() - began))
    return 1 if found or len(results) != said.cases else 0


if __name__ == "__main__":
    sys.exit(main())
