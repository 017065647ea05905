"""Picture of the calibration on the regime market, out of sample, into docs/img/.

python -m benchmarks.calibration_picture [--seed N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from tailguard.env import oracle_env
from tailguard.evaluation.calibration import draw, held_out
from tailguard.presets import regime

IMG = Path(__file__).resolve().parents[1] / "docs" / "img"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    task = regime()
    agent = task.train(seed)
    found = held_out(agent, oracle_env(task.market, 256, 1_000_000 + seed, episode_length=600), 600, warm_up=100)
    draw(found, IMG / "calibration.svg", "regime market, out of sample")
    predicted, realised = found.cvar(0.05)
    print(f"{len(found.realised)} predictions, largest coverage error {100 * found.worst:.1f} points")
    print(f"CVaR 5 %: predicted {predicted:.5f}, realised {realised:.5f}; PIT {np.round(found.pit_histogram, 2)}")
    print(f"pinball skill {np.round(found.skill, 3)}")


if __name__ == "__main__":
    main()
