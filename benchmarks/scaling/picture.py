"""The sweeps as one picture: time of a cycle above, memory below."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.scaling.points import Sweep

IMG = Path(__file__).resolve().parents[2] / "docs" / "img"
Found = list[tuple[int, dict[str, float]]]  # value of the varied size, what was measured there


def draw(found: dict[Sweep, Found], path: Path) -> None:
    """A column per sweep, both axes logarithmic, with a line of slope one beside the times."""
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "tailguard", "svg.fonttype": "none"})  # the same picture is the same file
    figure, axes = plt.subplots(2, len(found), figsize=(2.0 * len(found), 3.8), sharey="row", squeeze=False)
    for column, (sweep, rows) in enumerate(found.items()):
        values = [value for value, _ in rows]
        seconds = [row["cpu"] for _, row in rows]
        above, below = axes[:, column]
        above.loglog(values, seconds, marker=".", label="measured")
        linear = [seconds[-1] * value / values[-1] for value in values]
        above.loglog(values, linear, lw=0.8, ls=":", color="grey", label="linear")
        below.loglog(values, [max(row["memory"], 1.0) for _, row in rows], marker=".", color="tab:orange")
        below.set_xlabel(sweep.title)
        for axis in (above, below):
            axis.minorticks_off()  # thousands of them would be most of the file
    axes[0, 0].set_ylabel("CPU s per rollout and update")
    axes[1, 0].set_ylabel("memory, MB")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
