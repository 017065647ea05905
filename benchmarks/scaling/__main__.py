"""Steps per second and memory against the number of environments, steps, units, quantiles, assets and bars.

Every point is a process of its own, on one thread. At the end, a thousand updates in one process show whether memory
is lost. Writes the section `scaling` of RESULTS.md and docs/img/scaling.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from math import log
from typing import Any

from benchmarks.results import markdown_table, parser_of, publish
from benchmarks.scaling.picture import IMG, Found, draw
from benchmarks.scaling.points import SWEEPS, Sweep

MODULE = "benchmarks.scaling"


def apart(request: dict[str, Any]) -> dict[str, float]:
    """A measurement in a fresh process of one thread."""
    command = [sys.executable, "-m", "benchmarks.scaling.measure", json.dumps(request)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{request} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(sweep: Sweep, seconds: float, most: int | None) -> Found:
    rows: Found = []
    for value, point in sweep.points(most):
        began = time.perf_counter()
        rows.append((value, apart({"job": "cost", "point": asdict(point), "seconds": seconds})))
        found = rows[-1][1]
        print(
            f"{sweep.title:32s} {value:10,d}  {found['steps_per_second']:9,.0f} steps/s  {found['memory']:7,.0f} MB  "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return rows


def table(sweep: Sweep, rows: Found) -> str:
    """Growth is the exponent between a row and the one before: 1 is linear."""
    lines, before = [], None
    for value, found in rows:
        growth = f"{log(found['cpu'] / before[1]) / log(value / before[0]):.2f}" if before else ""
        before = value, found["cpu"]
        speeds = [f"{found[key]:,.0f}" for key in ("steps_per_second", "per_cpu")]
        lines.append([f"{value:,}", *speeds, f"{1e3 * found['cpu']:,.1f}", growth, f"{found['memory']:,.0f}"])
    return markdown_table([sweep.title, "steps/s", "steps/CPU s", "CPU ms per cycle", "growth", "memory, MB"], lines)


def report(found: dict[Sweep, Found], leak: dict[str, float], updates: int) -> str:
    terms = (
        "TradingVecEnv on random walks, 4 features per asset, one thread, 2 epochs, batches of 1,024 samples, twin "
        "critics. Where it is not varied: 64 environments, 64 steps (32 where environments vary; 8 environments where "
        "steps vary), LSTM of 64, 32 quantiles, 1 asset, 20,000 bars. A cycle is one rollout with its update. Growth "
        "is the exponent of its time from the row before: 1 is linear (the products of an LSTM grow with the square of "
        "its width). Memory is the most the process held, the making of the bars included, beyond a process that has "
        "learned the smallest thing."
    )
    lost = (
        f"Over {updates:,} updates in one process, memory held went from {leak['early']:.1f} MB after "
        f"{updates // 10:,} to {leak['late']:.1f} MB at the end: {leak['growth']:+.1f} MB."
    )
    return "\n\n".join([terms, *(table(sweep, rows) for sweep, rows in found.items()), lost])


def arguments() -> argparse.Namespace:
    parser = parser_of(MODULE, __doc__)
    keys = [sweep.key for sweep in SWEEPS]
    parser.add_argument("--sweeps", nargs="+", choices=keys, default=keys, help="what to vary (default all)")
    parser.add_argument("--most", type=int, help="leave out larger values")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per point (default 1)")
    parser.add_argument("--updates", type=int, default=1000, help="updates of the leak test (default 1,000)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = {s: measure(s, args.seconds, args.most) for s in SWEEPS if s.key in args.sweeps}
    body = report(found, apart({"job": "leak", "updates": args.updates}), args.updates)
    if not args.dry:
        draw(found, IMG / "scaling.svg")
    publish("scaling", "Scaling", MODULE, body, args.dry)


if __name__ == "__main__":
    main()
