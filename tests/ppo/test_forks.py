"""Training on two threads before a fork, in other processes, beside another training: it ends with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tests.agents import tiny_agent

STEPS = 4 * 32 * 2
END_S = 100.0
"""More than any of these trainings takes: a child that hangs is ended then."""


def built(seed: int = 0, torch_threads: int = 1) -> DistributionalPPO:
    """A small agent that is updated on two threads."""
    return tiny_agent(seed=seed, update_threads=2, torch_threads=torch_threads, batch_size=128)


def after_training(agent: DistributionalPPO) -> str:
    """A digest of the agent's policy after two updates."""
    agent.learn(STEPS)
    return state_digest(dict(agent.policy.state_dict()))


def trained(seed: int = 0, torch_threads: int = 1) -> str:
    return after_training(built(seed, torch_threads))


FORKED = """
import faulthandler, os, sys
import torch
from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tests.agents import tiny_agent
from tests.ppo.test_forks import END_S, STEPS, trained

threads = int(sys.argv[1])
agent = tiny_agent(seed=3, update_threads=2, torch_threads=threads, batch_size=128).learn(STEPS)
first = trained(torch_threads=threads)
noise = torch.randn(512, 512)
noise @ noise  # torch's own threads, if it may have any

def ended():
    agent.learn(STEPS, reset_num_timesteps=False)
    return first == trained(torch_threads=threads), state_digest(dict(agent.policy.state_dict()))

sys.stdout.flush()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(END_S, exit=True)
    print(*ended(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(*ended())
"""


@pytest.mark.parametrize("torch_threads", [1, 2])
def test_a_forked_child_trains_on_with_the_bits_of_its_parent(torch_threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(torch_threads)], capture_output=True, text=True, timeout=3 * END_S
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0] == lines[1]
    assert lines[0].startswith("True ")


def put_digest(results: multiprocessing.Queue[str]) -> None:
    torch.set_num_threads(1)
    results.put(trained())


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_processes_of_every_start_method_train_the_agent_that_their_parent_trained(method: str) -> None:
    expected = trained()
    context = multiprocessing.get_context(method)
    results = context.Queue()
    children = [context.Process(target=put_digest, args=(results,), daemon=True) for _ in range(2)]
    for child in children:
        child.start()
    assert [results.get(timeout=END_S) for _ in children] == [expected] * 2
    for child in children:
        child.join(END_S)
        assert child.exitcode == 0


def test_two_agents_train_in_two_threads_as_they_do_one_after_the_other() -> None:
    alone = [trained(seed) for seed in (0, 1)]
    agents = [built(seed) for seed in (0, 1)]  # here: SB3 seeds the process, so weights are drawn by one at a time
    with ThreadPoolExecutor(2) as pool:
        assert [future.result(END_S) for future in [pool.submit(after_training, agent) for agent in agents]] == alone
    assert alone[0] != alone[1]


def test_a_fork_while_another_thread_trains_leaves_both_able_to_train() -> None:
    expected = trained()
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(after_training, built())
        child = multiprocessing.get_context("fork").Process(target=os.getpid, daemon=True)
        child.start()
        child.join(END_S)
        assert child.exitcode == 0
        assert beside.result(END_S) == expected
