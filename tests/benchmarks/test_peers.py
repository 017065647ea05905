"""The comparison itself: what it sends to processes, how it sums up, and that the loops written for it are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.peers.cases import N_EPOCHS, Case, make_env
from benchmarks.peers.compare import Measured, Plan
from benchmarks.peers.learners import LEARNERS, cleanrl_style
from benchmarks.peers.learners.cycle import GAMMA, LAMBDA
from benchmarks.peers.measure import Request, measure
from benchmarks.peers.report import report
from tailguard.rollout.advantages import advantages, successor_values

CASE = Case("cartpole", hidden=8, n_envs=2, n_steps=8)


def test_a_request_survives_the_way_into_another_process() -> None:
    request = Request("ours", CASE, threads=2, seconds=0.5)
    assert Request.parse(request.dump()) == request


def test_the_part_of_a_long_update_that_is_not_run_is_counted() -> None:
    short, long = Case("cartpole", 64, 8, 128), Case("cartpole", 64, 64, 2048)
    assert short.uncounted(short.peer_work()) == 0.0
    work = long.peer_work()
    run = work.epochs * work.batches(long.batch) * long.batch
    assert run * (1.0 + long.uncounted(work)) == N_EPOCHS * long.rollout


def test_a_peer_is_judged_by_its_fastest_number_of_threads() -> None:
    measured = Measured()
    measured.add(Request("ours", CASE, 2, 1.0), {"wall": 30.0, "cpu": 20.0})
    for speed in (1.0, 3.0, 2.0):
        measured.add(Request("recurrent_ppo", CASE, 1, 1.0), {"wall": speed, "cpu": speed})
    measured.add(Request("recurrent_ppo", CASE, 2, 1.0), {"wall": 5.0, "cpu": 1.0})
    assert measured.ratio("ours", CASE, "recurrent_ppo", "wall") == 30.0 / 5.0
    assert measured.ratio("ours", CASE, "recurrent_ppo", "cpu") == 20.0 / 2.0


def test_the_report_shows_both_clocks_and_every_learner() -> None:
    threads = {"ours": (2,), "recurrent_ppo": (1,), "jax": (1,)}
    plan = Plan((CASE,), threads, rounds=1, seconds=1.0, minutes=1.0)
    measured = Measured()
    for request, speed in zip(plan.requests(), (60.0, 6.0, 20.0), strict=True):
        measured.add(request, {"wall": speed, "cpu": speed / 2})
    text = report(plan, measured)
    assert "| 8 | 2 | 8 | 60 | 6 | 10.0 | 30 | 3 | 10.0 |" in text
    assert f"ours / {LEARNERS['jax'].title} | **3.0** | 3.0 | **3.0** | 3.0 |" in text


@pytest.mark.parametrize("env", ["trading", "cartpole"])
def test_a_measurement_counts_steps_by_both_clocks(env: str) -> None:
    found = measure(Request("cleanrl", Case(env, 8, 2, 8), threads=1, seconds=0.01))
    assert 0.0 < found["wall"] < 1e6
    assert 0.0 < found["cpu"] < 1e6


def test_the_step_by_step_loop_forgets_where_an_episode_starts() -> None:
    torch.manual_seed(0)
    trunk, x = cleanrl_style.Trunk(3, 8, 2), torch.randn(6, 1, 3)
    starts = torch.zeros(6, 1)
    starts[4] = 1.0
    whole, _ = trunk(x, trunk.initial_state(1), starts)
    second, _ = trunk(x[4:], trunk.initial_state(1), torch.zeros(2, 1))
    torch.testing.assert_close(whole[4:], second)


@pytest.mark.parametrize("env", ["trading", "cartpole"])
def test_the_loop_recalls_what_it_thought_when_it_acted(env: str) -> None:
    case = Case(env, hidden=8, n_envs=2, n_steps=64)
    learner = cleanrl_style.make(case, make_env(case), case.peer_work(), threads=1)
    learner.collect_rollouts()
    learner.collect_rollouts()  # memories now come from the rollout before
    with torch.no_grad():
        rollout, agent = learner.rollout, learner.agent
        outputs, _ = agent.actor(rollout.obs, rollout.states[0], rollout.starts)
        values, _ = agent.critic(rollout.obs, rollout.states[1], rollout.starts)
        torch.testing.assert_close(agent.law(outputs).log_prob(rollout.actions), rollout.log_probs)
        torch.testing.assert_close(values[..., 0], rollout.values)


def test_the_loop_estimates_the_advantages_we_estimate() -> None:
    rng = np.random.default_rng(0)
    rewards, values, last = rng.normal(size=(9, 2)), rng.normal(size=(9, 2)), rng.normal(size=2)
    dones = rng.random((9, 2)) < 0.3
    starts = np.vstack([np.zeros((1, 2)), dones[:-1]])
    theirs = cleanrl_style.advantages_of(
        *(torch.as_tensor(a, dtype=torch.float64) for a in (rewards, values, starts, last, dones[-1]))
    )
    all_values = np.vstack([values, last])
    follows = successor_values(all_values, np.zeros((9, 2)), dones, np.zeros((9, 2), bool))
    np.testing.assert_allclose(theirs.numpy(), advantages(rewards, all_values, follows, dones, GAMMA, LAMBDA))


def test_the_loop_learns_from_its_own_rollout() -> None:
    learner = cleanrl_style.make(CASE, make_env(CASE), CASE.peer_work(), threads=1)
    before = [parameter.clone() for parameter in learner.agent.parameters() if parameter.requires_grad]
    learner.learn(CASE.rollout)
    after = [parameter for parameter in learner.agent.parameters() if parameter.requires_grad]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_measurement_of_short_rollouts_covers_whole_episodes() -> None:
    """128 steps of episodes of 250: a start lies in every other rollout, so an even number is a fair sample."""
    assert Case("trading", 64, 8, 128).least_cycles == 8
    assert Case("trading", 64, 8, 2_048).least_cycles == 1
