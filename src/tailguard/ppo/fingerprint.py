"""Where an agent was trained: versions and machine, as far as the last bits of a result depend on them."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from tailguard import kernels


def fingerprint() -> dict[str, Any]:
    """What bit-identical results depend on besides the code."""
    return {
        "tailguard": package_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "kernels": kernels.status().split(",")[0],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
    }


def package_version() -> str:
    """The installed version; a source tree that is only on the path has none."""
    try:
        return version("tailguard")
    except PackageNotFoundError:
        return "source"


def warn_of_another_machine(path: Any, manifest: Mapping[str, Any]) -> None:
    """Say what differs from where a bundle was written: the resumed run may differ in its last bits."""
    saved, here = manifest.get("fingerprint"), fingerprint()
    if not isinstance(saved, Mapping):
        return
    differs = [f"{name} {saved.get(name)} -> {now}" for name, now in here.items() if saved.get(name) != now]
    if differs:
        warnings.warn(
            f"{path} was written elsewhere ({', '.join(differs)}): training goes on, but not bit for bit.", stacklevel=3
        )
