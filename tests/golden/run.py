"""The golden run: three updates at a fixed seed, written down. `python -m tests.golden.run` records it anew.

A change of these numbers is its own commit, explained under "Numerics" in CHANGELOG.md.
"""

from __future__ import annotations

import json
import platform
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback

from tailguard.checkpoint import state_digest
from tailguard.kernels import native
from tests.agents import tiny_agent
from tests.environments import cartpole, pendulum

RECORD = Path(__file__).with_name("record.json")
FIGURES = ("train/policy_gradient_loss", "train/value_loss", "train/entropy", "train/approx_kl", "train/grad_norm")


class Notes(BaseCallback):
    """The figures of every update."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.note()

    def _on_training_end(self) -> None:
        self.note()

    def note(self) -> None:
        values = self.logger.name_to_value
        if FIGURES[0] in values:
            self.rows.append([float(values[name]) for name in FIGURES])


def run(env: str) -> dict[str, Any]:
    """Three updates; figures of each, and one hash over all state."""
    torch.set_num_threads(1)
    make = {"cartpole": cartpole, "pendulum": pendulum}[env]
    agent, notes = tiny_agent(make(4, 0)), Notes()
    agent.learn(3 * 128, callback=notes, log_interval=10**6)
    state = {name: part.state_dict() for name, part in agent.parts().items()}
    return {"figures": notes.rows[-3:], "sha256": state_digest(state)}


def fingerprint() -> dict[str, str]:
    """What bit-identical results depend on besides the code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    cpu = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    module = native()
    return {
        "kernels": "reference" if module is None else str(module.level),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": f"{torch.backends.cpu.get_cpu_capability()} {sha256(repr(cpu).encode()).hexdigest()[:16]}",
    }


if __name__ == "__main__":
    record = {"fingerprint": fingerprint(), "cartpole": run("cartpole"), "pendulum": run("pendulum")}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
