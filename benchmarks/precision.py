"""What bfloat16 changes in what is learned: the same seeds with and without it.

`python -m benchmarks.precision` trains on an oracle market and compares fractions of the optimum seed by seed. Rounding
makes another training of every seed, as another seed would, so it takes many of them to tell a loss from chance.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.oracles import interval, ours, over_seeds
from benchmarks.results import markdown_table, parser_of, publish
from benchmarks.roofline import PRECISIONS

MODULE = "benchmarks.precision"


def row(rounded: str, fractions: np.ndarray, plain: np.ndarray) -> list[str]:
    """A variant beside float32: fraction of the optimum, and the mean difference over seeds with its standard error."""
    difference = fractions - plain
    error = difference.std(ddof=1) / len(difference) ** 0.5
    paired = f"{difference.mean():+.3f} ± {error:.3f}" if difference.any() else ""
    return [rounded, interval(fractions), f"{fractions.mean():.3f}", f"{fractions.min():.3f}", paired]


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--market", default="regime", help="preset (default regime)")
    parser.add_argument("--steps", type=int, default=400_000, help="steps per seed (default 400,000)")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds (default 20)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes at once; one per core by default"
    )
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for rounded, changes in PRECISIONS.items():
        arguments = options.market, "MlpLstmPolicy", changes, options.steps
        found[rounded] = over_seeds(ours, options.seeds, options.workers, *arguments)["fraction"]
        print(row(rounded, found[rounded], found["none"]), flush=True)
    header = ["bfloat16", "interquartile mean (95 %)", "mean", "lowest", "difference to none, seed by seed"]
    table = markdown_table(header, [row(rounded, values, found["none"]) for rounded, values in found.items()])
    words = (
        f"Fraction of the optimum on `{options.market}` after {options.steps:,} steps, {options.seeds} seeds, "
        "deterministic policy on bars it has never seen. In brackets a bootstrap interval over seeds; behind ± the "
        "standard error."
    )
    publish("precision", "What bfloat16 learns", MODULE, f"{words}\n\n{table}", options.dry)


if __name__ == "__main__":
    main()
