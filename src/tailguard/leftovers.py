"""Nothing outside the run folder: caches that libraries would leave in the home or the temporary folder.

matplotlib makes a folder in the home as soon as it is imported, which SB3's logger does, and later a cache of fonts;
torch makes an empty folder of its compiler as soon as an optimizer is made.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parent
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
CHOSEN_BY_USER = INDUCTOR in os.environ


def keep_caches_out_of_home() -> None:
    """Give libraries a folder that is removed at the end, where they would make one that stays or could make none.

    Who has set their variables, or has folders of matplotlib already, keeps both.
    """
    with suppress(OSError):  # no folder at all can be written: the libraries say so where it matters
        if "MPLCONFIGDIR" not in os.environ and "matplotlib" not in sys.modules and not has_matplotlib_folders():
            os.environ["MPLCONFIGDIR"] = passing_folder("matplotlib")


def passing_folder(name: str) -> str:
    """A folder of this process and those it starts; only this user can write there."""
    place = tempfile.mkdtemp(prefix=f"tailguard-{name}-")
    atexit.register(remove_in, os.getpid(), place)
    return place


def remove_in(pid: int, place: str) -> None:
    """Remove a folder when the process that made it ends; one that was forked from it leaves it alone."""
    if os.getpid() == pid:
        shutil.rmtree(place, ignore_errors=True)


def has_matplotlib_folders() -> bool:
    """Whether matplotlib has been at home here: then it makes nothing new by being imported."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "matplotlib"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "matplotlib"
    return config.is_dir() and cache.is_dir() and writable(config) and writable(cache)


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # nobody says where it is
        return Path("/nonexistent")


def writable(place: Path) -> bool:
    """Whether files can be made in a folder, found by making one: permissions alone do not tell."""
    try:
        handle, name = tempfile.mkstemp(dir=place)
    except OSError:
        return False
    os.close(handle)
    os.unlink(name)
    return True


def remove_empty_compiler_folder() -> None:
    """What torch's compiler left in the temporary folder by being imported; it makes it anew when it has something."""
    place = os.environ.get(INDUCTOR)
    if place is not None and not CHOSEN_BY_USER:
        with suppress(OSError):  # it is not empty, or not there
            os.rmdir(place)
