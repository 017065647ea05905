"""How soon a training is under way in a process that has never run: imports, first update, hundredth update.

`python -m benchmarks.cold_start` starts fresh processes with an empty home and empty caches, by turns for us and for
RecurrentPPO, and takes medians of their CPU time. An update is a rollout of 8 environments x 128 steps and the training
on it, in CartPole without velocities, with the defaults of either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from statistics import median

from benchmarks.results import markdown_table, parser_of, publish

MODULE = "benchmarks.cold_start"
LEARNERS = {
    "Ours": ("tailguard", "DistributionalPPO", {}),
    "RecurrentPPO": ("sb3_contrib", "RecurrentPPO", {"n_steps": 128}),
}
CHILD = """
import json, sys, time
module, name, settings = json.loads(sys.argv[1])
began = time.process_time()
kind = getattr(__import__(module, fromlist=[name]), name)
imported = time.process_time()
from stable_baselines3.common.env_util import make_vec_env
env = make_vec_env("CartPole-v1", n_envs=8, seed=0)
started = time.process_time()
model = kind("MlpLstmPolicy", env, seed=0, **settings)
model.learn(8 * 128)
first = time.process_time()
model.learn(98 * 8 * 128, reset_num_timesteps=False)
before = time.process_time()
model.learn(8 * 128, reset_num_timesteps=False)
print(json.dumps([imported - began, first - started, time.process_time() - before]))
"""


def measure(learner: str) -> list[float]:
    """CPU seconds of imports, of the first update, and of the hundredth, in a fresh process with fresh caches."""
    with tempfile.TemporaryDirectory() as home:
        fresh = {"HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(LEARNERS[learner])],
            env={**os.environ, **fresh},
            check=True,
            capture_output=True,
            text=True,
        )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each (default 5)")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {learner: [] for learner in LEARNERS}
    for _ in range(options.rounds):
        for learner, rows in found.items():
            rows.append(measure(learner))
    rows = [[learner, *(f"{median(part):.2f}" for part in zip(*runs, strict=True))] for learner, runs in found.items()]
    header = ["CPU seconds, medians", "imports", "first update", "hundredth update"]
    words = f"{options.rounds} fresh processes of each with an empty home, by turns; 8 environments x 128 steps."
    publish("cold-start", "Cold start", MODULE, f"{words}\n\n{markdown_table(header, rows)}", options.dry)


if __name__ == "__main__":
    main()
