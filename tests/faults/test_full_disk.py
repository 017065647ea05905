"""K3: a disk that is full, read-only, forbidden or gone: one clear error, what was saved is intact, no temp left."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailguard import DistributionalPPO
from tailguard.errors import CheckpointError, RunError, TailguardError
from tailguard.run import Listener, RunFolder, Update
from tests.agents import tiny_agent
from tests.runs import STEPS_PER_UPDATE, begin, go_on, tiny_experiment, whole_state

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, keep_bytes: int) -> Path:
    """A file that leaves so much free."""
    file = place / "ballast"
    file.write_bytes(b"\0" * max(shutil.disk_usage(place).free - keep_bytes, 0))
    return file


def test_a_full_disk_is_said_with_its_free_bytes(small_disk: Path) -> None:
    agent = tiny_agent()
    agent.save(small_disk / "agent")
    agent.learn(128)
    ballast = fill(small_disk, 20_000)
    with pytest.raises(CheckpointError, match=r"No space left on device. It needs [0-9,]+ bytes, [0-9,]+ are free"):
        agent.save(small_disk / "agent")
    assert sorted(path.name for path in small_disk.iterdir()) == ["agent", "ballast"]
    assert DistributionalPPO.load(small_disk / "agent").num_timesteps == 0
    ballast.unlink()
    agent.save(small_disk / "agent")
    assert DistributionalPPO.load(small_disk / "agent").num_timesteps == 128


def test_a_run_on_a_full_disk_stops_with_its_checkpoints_and_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    experiment = tiny_experiment("regime", updates=8)
    begin(RunFolder(tmp_path / "whole"), experiment)
    folder = RunFolder(small_disk / "run")

    def fill_up(update: Update) -> None:
        if update.step == 4 * STEPS_PER_UPDATE:
            fill(small_disk, 0)

    with pytest.raises(CheckpointError, match="No space left on device"):
        begin(folder, experiment, Listener(update=fill_up))
    assert folder.steps()[-1] == 4 * STEPS_PER_UPDATE
    (small_disk / "ballast").unlink()
    assert go_on(folder, experiment).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(RunFolder(tmp_path / "whole").last_checkpoint())


def in_child(work: Callable[[], None]) -> str:
    """The error that `work` ends in, from a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"nothing went wrong"
        try:
            work()
        except TailguardError as error:
            said = f"{type(error).__name__}: {error}".encode()
        except BaseException as error:
            said = f"not ours: {error!r}".encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def test_a_file_that_may_grow_no_further_is_said(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.save(tmp_path / "agent")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        agent.save(tmp_path / "agent")

    assert "CheckpointError: Cannot write" in (said := in_child(limited))
    assert "File too large" in said
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    DistributionalPPO.load(tmp_path / "agent")


def test_a_folder_without_permission_is_said(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs to become another user")
    agent = tiny_agent()
    place = tmp_path / "theirs"
    agent.save(place / "agent")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)

    def as_nobody() -> None:
        os.setuid(65534)
        agent.save(place / "agent")

    assert "CheckpointError: Cannot write" in (said := in_child(as_nobody))
    assert "Permission denied" in said
    assert [path.name for path in place.iterdir()] == ["agent"]


def test_a_read_only_disk_is_said(small_disk: Path) -> None:
    agent = tiny_agent()
    agent.save(small_disk / "agent")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        agent.save(small_disk / "agent")
    DistributionalPPO.load(small_disk / "agent")


def test_a_run_folder_that_is_deleted_while_training_is_said(tmp_path: Path) -> None:
    experiment, folder = tiny_experiment("regime"), RunFolder(tmp_path / "run")

    def delete(update: Update) -> None:
        if update.step == 3 * STEPS_PER_UPDATE:
            shutil.rmtree(folder.path)

    with pytest.raises(RunError, match="was removed while its training ran"):
        begin(folder, experiment, Listener(update=delete))
