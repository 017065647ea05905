"""A driver in a process of its own, for tests that kill it: `python -m tests.population.drive FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tailguard.population.local import LocalExecutor
from tests.population.tiny import digest_of, tiny_population

if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(digest_of(tiny_population(rounds=6), place, LocalExecutor(2, 600.0, place / "logs")))
