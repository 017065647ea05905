"""Worker processes of environments: one that dies or freezes is named, and the environment can be closed."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from tailguard.errors import EnvWorkerError
from tailguard.rollout.workers import watch_workers
from tests.agents import tiny_agent
from tests.environments import ConstantReward


class Slow(ConstantReward):
    """Answers a step after a while."""

    def step(self, action):  # type: ignore[no-untyped-def]
        time.sleep(0.2)
        return super().step(action)


def workers(n: int = 3, kind: type = ConstantReward) -> SubprocVecEnv:
    return SubprocVecEnv([partial(kind, limit=10) for _ in range(n)], start_method="fork")


def test_a_killed_worker_is_named_with_its_signal() -> None:
    env = workers()
    agent = tiny_agent(VecNormalize(env, norm_reward=False), batch_size=48)
    agent.learn(96)
    os.kill(env.processes[1].pid, signal.SIGKILL)
    pid = env.processes[1].pid
    with pytest.raises(EnvWorkerError, match=rf"environment 1 \(process {pid}\) was killed by SIGKILL"):
        agent.learn(96, reset_num_timesteps=False)
    env.close()


def test_a_frozen_worker_is_given_up_after_the_timeout_also_in_reset() -> None:
    for stage in ("step", "reset"):
        env = workers()
        agent = tiny_agent(env, batch_size=48, env_timeout=0.3)
        if stage == "step":
            agent.learn(96)
        os.kill(env.processes[2].pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EnvWorkerError, match=r"environment 2 .*gave no answer for 0.3 s.*env_timeout"):
            agent.learn(96, reset_num_timesteps=False)
        env.close()
        assert time.monotonic() - began < 5.0
        assert not any(process.is_alive() for process in env.processes)


def test_a_worker_that_is_only_slow_is_waited_for() -> None:
    env = workers(2, Slow)
    watch_workers(env, 5.0)
    watch_workers(env, 10.0)  # twice is once
    env.reset()
    assert env.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
    env.close()
