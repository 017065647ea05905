"""Worker processes of SB3's SubprocVecEnv, watched: one that dies or freezes is named instead of waited for."""

from __future__ import annotations

import signal
from multiprocessing.connection import wait
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from tailguard.errors import EnvWorkerError


def watch_workers(env: VecEnv | None, timeout_s: float) -> None:
    """Put a watch on every pipe of a SubprocVecEnv below any wrappers; other environments are left alone."""
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    if isinstance(env, SubprocVecEnv):
        env.remotes = tuple(
            Worker(getattr(remote, "pipe", remote), env, number, timeout_s) for number, remote in enumerate(env.remotes)
        )


class Worker:
    """The pipe to one worker, with a limit on its silence."""

    def __init__(self, pipe: Any, env: SubprocVecEnv, number: int, timeout_s: float) -> None:
        self.pipe, self.env, self.number, self.timeout_s = pipe, env, number, timeout_s
        self.gone = False

    def send(self, message: Any) -> None:
        if self.gone and message[0] == "close":
            return
        try:
            self.pipe.send(message)
        except OSError:
            raise self.lost() from None

    def recv(self) -> Any:
        # the end of the process is watched too: a forked sibling holds a copy of its pipe, which then never closes
        ready = wait([self.pipe, self.env.processes[self.number].sentinel], self.timeout_s)
        if not ready:
            raise self.frozen()
        try:
            if self.pipe not in ready and not self.pipe.poll(0):
                raise self.lost()
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            raise self.lost() from None

    def close(self) -> None:
        self.pipe.close()

    def lost(self) -> EnvWorkerError:
        """The error for a worker that ended."""
        process = self.end()
        process.join(1.0)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        return EnvWorkerError(
            f"The worker of environment {self.number} (process {process.pid}) {how}. Its own message, if any, is "
            "above; a kill without one is often the system's answer to memory running out. The last checkpoint is "
            "intact: resume from it with a fresh environment."
        )

    def frozen(self) -> EnvWorkerError:
        """The error for a worker that does not answer; it is ended, or it would be waited for at exit."""
        process = self.end()
        process.kill()
        return EnvWorkerError(
            f"The worker of environment {self.number} (process {process.pid}) gave no answer for {self.timeout_s:g} s "
            "and was ended. Raise env_timeout if a step may take that long. The last checkpoint is intact: resume from "
            "it with a fresh environment."
        )

    def end(self) -> Any:
        """Expect nothing more from this worker, so that the environment can still be closed."""
        self.gone, self.env.waiting = True, False
        return self.env.processes[self.number]
