"""K3: the process ends before or after every single operation on the file system of one save, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common.vec_env import VecEnv

from tailguard import DistributionalPPO
from tailguard.run import RunFolder
from tailguard.run.checkpoints import newest_good, prune, tidy
from tests.agents import tiny_agent
from tests.environments import cartpole

pytestmark = pytest.mark.slow

OPERATIONS = ("open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir", "chmod", "close")


def crash_at(number: int, after: bool, work: Callable[[], None]) -> int | None:
    """Do `work` in a forked process that ends without farewell at its n-th operation; None when it came to its end.

    The name of the operation is returned as its index, through the exit code.
    """
    pid = os.fork()
    if pid == 0:
        count = -1

        def counted(index: int, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                chosen = count == number
                if chosen and not after:
                    if OPERATIONS[index] == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])  # half of it arrives
                    os._exit(100 + index)
                try:
                    return real(*arguments, **options)
                finally:
                    if chosen:
                        os._exit(100 + index)

            return call

        try:
            for index, name in enumerate(OPERATIONS):
                setattr(os, name, counted(index, getattr(os, name)))
            work()
            os._exit(0)
        finally:
            os._exit(1)  # the save itself failed
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0 or 100 <= code < 100 + len(OPERATIONS), code
    return None if code == 0 else code - 100


def every_crash(work: Callable[[], None], check: Callable[[], None], restore: Callable[[], None]) -> set[str]:
    """Crash before and after each operation until the work comes to its end; which operations there were."""
    seen = set()
    for number in range(1000):
        for after in (False, True):
            restore()
            operation = crash_at(number, after, work)
            check()
            if operation is None:
                return seen
            seen.add(OPERATIONS[operation])
    raise AssertionError("the save never ended")


@pytest.fixture(scope="module")
def env() -> VecEnv:
    return cartpole(4, 0)


def test_a_checkpoint_of_a_run_survives_a_crash_at_every_operation(tmp_path: Path, env: VecEnv) -> None:
    agent, folder = tiny_agent(env), RunFolder(tmp_path / "run")
    kept = tmp_path / "kept"
    for updates in (1, 2):
        agent.learn(128, reset_num_timesteps=updates == 1)
        agent.checkpoint(RunFolder(kept).checkpoint(agent.num_timesteps))
    agent.learn(128, reset_num_timesteps=False)

    def save() -> None:
        agent.write(folder.checkpoint(384), {"restart": True}, {})
        prune(folder, keep_last=2)

    def restore() -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(kept, folder.path)

    found = []

    def check() -> None:
        written = folder.checkpoint(384).is_dir()
        tidy(folder)
        resumed = newest_good(folder, lambda: env, exact=True)
        assert resumed is not None
        assert resumed.num_timesteps == (384 if written else 256)
        assert len(folder.steps()) >= 2
        assert not list(folder.checkpoints.glob(".*"))
        found.append(resumed.num_timesteps)

    seen = every_crash(save, check, restore)
    assert {"open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir"} <= seen
    assert set(found) == {256, 384}
    print(f"{len(found)} crash points")


def test_replacing_an_agent_survives_a_crash_at_every_operation(tmp_path: Path, env: VecEnv) -> None:
    agent, place = tiny_agent(env), tmp_path / "here" / "agent"
    agent.learn(128)
    agent.save(tmp_path / "old")
    agent.learn(128, reset_num_timesteps=False)
    found = []

    def restore() -> None:
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "old", place)

    def check() -> None:
        steps = DistributionalPPO.load(place).num_timesteps
        assert steps in (128, 256)
        found.append(steps)
        agent.save(place)  # and the next save goes through
        assert DistributionalPPO.load(place).num_timesteps == 256

    seen = every_crash(lambda: agent.save(place), check, restore)
    assert {"open", "write", "fsync", "rename", "unlink"} <= seen
    assert found == sorted(found)
    print(f"{len(found)} crash points")
