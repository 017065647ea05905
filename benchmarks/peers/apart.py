"""Processes for measurements: which interpreter, how many threads, what else must be installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.peers.learners import LEARNERS
from benchmarks.peers.measure import Request

CACHE = Path(os.environ.get("TAILGUARD_TEST_CACHE", Path.home() / ".cache" / "tailguard-tests")) / "speed-peers"
ROOT = Path(__file__).resolve().parents[2]
LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def measure_apart(request: Request) -> dict[str, float]:
    """A measurement in a fresh process with that many threads."""
    command = [interpreter(LEARNERS[request.who].packages), "-m", "benchmarks.peers.measure", request.dump()]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    limits = dict.fromkeys(LIMITS, str(request.threads))
    environment = {**os.environ, **limits, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{request.who} failed on {request.case}:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def interpreter(packages: tuple[str, ...]) -> str:
    """Ours, or for packages that are no dependency of ours one that has them and sees all of ours."""
    if not packages:
        return sys.executable
    folder = CACHE / "-".join(packages).replace("==", "-")
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"installing {', '.join(packages)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        own = next(folder.glob("lib/python*/site-packages"))
        (own / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")  # the same torch and numpy
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        ready.touch()
    return str(python)


def installable(who: str) -> bool:
    """Whether the learner's packages are there or can be had."""
    try:
        interpreter(LEARNERS[who].packages)
    except subprocess.CalledProcessError:
        return False
    return True
