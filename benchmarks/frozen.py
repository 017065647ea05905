"""What a frozen policy costs to import and to ask: python -m benchmarks.frozen

Prints CPU seconds of `import tailguard_runtime` in a fresh process, and microseconds per decision for one symbol on one
core: the median and the 99th percentile over single calls, from a raw observation and a state to an action and a state.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import numpy as np
from gymnasium import spaces

import tailguard_runtime
from tailguard import DistributionalPPO
from tailguard.frozen import export
from tailguard_runtime import FrozenPolicy
from tests.random_agents import AnySpaces

N_FEATURES, N_CALLS, N_IMPORTS = 17, 20_000, 9
AGENTS: dict[str, dict[str, Any]] = {
    "lstm 64, layers 64 64": {},
    "lstm 256, layers 64 64": {"lstm_hidden_size": 256},
    "gru 64, layers 64 64": {"memory": "gru"},
    "two lstm layers of 64": {"n_lstm_layers": 2},
}
IMPORT = "import time; begun = time.process_time(); import tailguard_runtime; print(time.process_time() - begun)"


def import_seconds() -> float:
    """Median CPU seconds of the import, numpy's included."""
    environment = {**os.environ, "PYTHONPATH": str(Path(tailguard_runtime.__file__).parents[1])}
    runs = (
        subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True)
        for _ in range(N_IMPORTS)
    )
    return median(float(run.stdout) for run in runs)


def decision_microseconds(policy: FrozenPolicy) -> tuple[float, float]:
    """Median and 99th percentile of single steps."""
    seen = np.random.default_rng(0).normal(size=(N_CALLS, 1, N_FEATURES)).astype(np.float32)
    state, spent = policy.initial_state(1), np.empty(N_CALLS)
    for i, observation in enumerate(seen):
        begun = perf_counter_ns()
        _, state = policy.step(observation, state)
        spent[i] = (perf_counter_ns() - begun) / 1_000
    return float(np.median(spent)), float(np.quantile(spent, 0.99))


def main() -> None:
    print(f"import tailguard_runtime: {import_seconds():.3f} CPU seconds, numpy included")
    print("| agent | median us per decision | 99th percentile |\n| --- | ---: | ---: |")
    for name, kwargs in AGENTS.items():
        env = AnySpaces(2, 0, N_FEATURES, spaces.Box(-1.0, 1.0, (1,), np.float32))
        with TemporaryDirectory() as place:
            policy = FrozenPolicy.load(export(DistributionalPPO("MlpLstmPolicy", env, policy_kwargs=kwargs), place))
        middle, high = decision_microseconds(policy)
        print(f"| {name} | {middle:.0f} | {high:.0f} |")


if __name__ == "__main__":
    main()
