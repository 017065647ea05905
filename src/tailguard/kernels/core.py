"""Whether the native core is there, what it was built of, and how many cores it may use."""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tailguard.errors import ConfigError

NATIVE_SOURCES = Path(__file__).parent / "native"
SWITCH = "TAILGUARD_KERNELS"


@cache
def extension() -> tuple[ModuleType | None, str]:
    """The extension module, or None and why it cannot be used; asked for once in a process."""
    wish = os.environ.get(SWITCH, "native")
    if wish not in ("native", "reference"):
        raise ConfigError(f"{SWITCH}={wish!r} is unknown. Use native (the default) or reference.")
    if wish == "reference":
        return None, f"{SWITCH}=reference"
    try:
        return import_module("tailguard.kernels._native"), ""
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        return None, "it was not built: `make core` builds it" if missing else f"it cannot be loaded: {error}"


def native() -> ModuleType | None:
    """The extension module; None where it was not built or TAILGUARD_KERNELS=reference turns it off."""
    return extension()[0]


def status() -> str:
    """One line for logs and `tailguard doctor`: what the kernels run on."""
    module, why = extension()
    if module is None:
        return f"without the native core ({why}): the same results from torch and numpy, several times slower"
    return f"native core for {module.level}, {available_cores()} cores{', STALE: run `make core`' if stale() else ''}"


def stale() -> bool:
    """Whether the extension was built of other sources than those beside it; False where one of the two is missing."""
    module = extension()[0]
    build_file = NATIVE_SOURCES.parents[3] / "CMakeLists.txt"
    if module is None or not build_file.is_file() or not NATIVE_SOURCES.is_dir():
        return False
    return bool(
        module.source_digest != source_digest([*NATIVE_SOURCES.glob("*.cpp"), *NATIVE_SOURCES.glob("*.h"), build_file])
    )


def source_digest(sources: list[Path]) -> str:
    """SHA-256 over names and contents of files; CMakeLists.txt computes the same."""
    lines = sorted(f"{path.name}={sha256(path.read_bytes()).hexdigest()}" for path in sources)
    return sha256("\n".join(lines).encode()).hexdigest()


def available_cores() -> int:
    """Cores this process may keep busy: its affinity, and no more than the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that control groups (version 2, or 1) grant; None without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    folders = {root, root / "cpu"}
    for line in lines:
        path = Path(line.split(":", 2)[-1].strip("/"))
        for group in (path, *path.parents):
            folders |= {root / group, root / "cpu" / group}
    quotas = [quota for quota in map(quota_in, folders) if quota is not None]
    return min(quotas, default=None)


def quota_in(folder: Path) -> float | None:
    """Cores' worth of time that one control group grants its processes."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None
