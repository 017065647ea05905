"""Checks of the environment's contract, on random actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from tailguard.doctor.checks import Check, Verdict, healthy, judged, not_applicable, sick
from tailguard.doctor.patient import Patient

Array = NDArray[Any]
N_STEPS = 400
LONGEST = 2_500  # steps in which at least one episode should end


@dataclass
class Seen:
    """A walk through the environment: everything as it was returned, copied at once."""

    observations: Array  # (S + 1, N, ...)
    returned: list[Array]  # the very arrays the environment gave out
    rewards: Array  # (S, N)
    dones: Array  # (S, N)
    infos: list[list[dict[str, Any]]]


def walk(env: VecEnv, actions: list[Array]) -> Seen:
    """Reset and take the actions."""
    first = env.reset()
    returned, observations = [first], [np.array(first)]
    rewards, dones, infos = [], [], []
    for action in actions:
        obs, reward, done, info = env.step(action)
        returned.append(obs)
        observations.append(np.array(obs))
        rewards.append(np.array(reward))
        dones.append(np.array(done))
        infos.append(list(info))
    return Seen(np.stack(observations), returned, np.stack(rewards), np.stack(dones), infos)  # type: ignore[arg-type]


def walked(patient: Patient, n_envs: int = 2, seed: int = 0, n_steps: int = N_STEPS, action_seed: int = 0) -> Seen:
    env = patient.env(n_envs, seed)
    try:
        return walk(env, patient.actions(n_envs, n_steps, action_seed))
    finally:
        env.close()


def spaces(patient: Patient) -> Verdict:
    env = patient.env(2, 0)
    try:
        space, obs = env.observation_space, np.asarray(env.reset())
        if obs.shape[1:] != space.shape:
            return sick(f"observation {obs.shape[1:]}, space {space.shape}", "Make reset return what the space says.")
        outside = [n for n, row in enumerate(obs) if not space.contains(row.astype(space.dtype))]
        return judged(
            not outside, f"{space}", "An observation lies outside the space: widen its bounds, or fix the observation."
        )
    finally:
        env.close()


def finite(patient: Patient) -> Verdict:
    seen = walked(patient)
    broken = int((~np.isfinite(seen.observations)).sum() + (~np.isfinite(seen.rewards)).sum())
    return judged(
        broken == 0,
        f"{broken} numbers in {N_STEPS} steps are not finite",
        "Find the step that makes them; a policy trained on NaN is NaN.",
    )


def varied(patient: Patient) -> Verdict:
    rewards = walked(patient).rewards
    spread = float(rewards.std())
    return judged(
        spread > 0.0 or float(np.abs(rewards).max()) > 0.0,
        f"rewards {rewards.mean():.3g} +- {spread:.3g}",
        "Every reward is zero under random actions: nothing can be learned from it.",
    )


def deterministic(patient: Patient) -> Verdict:
    one, two = walked(patient, seed=7), walked(patient, seed=7)
    same = all(
        np.array_equal(a, b, equal_nan=True)
        for a, b in ((one.observations, two.observations), (one.rewards, two.rewards), (one.dones, two.dones))
    )
    return judged(
        same,
        f"{N_STEPS} steps twice from one seed are {'equal' if same else 'different'}",
        "Draw every random number from self.np_random, seeded in reset(seed=...); exact resume needs it.",
    )


def isolated(patient: Patient) -> Verdict:
    actions, others = patient.actions(2, N_STEPS, 0), patient.actions(2, N_STEPS, 1)
    mixed = [np.stack([own[0], other[1]]) for own, other in zip(actions, others, strict=True)]
    envs = patient.env(2, 3), patient.env(2, 3)
    one, two = walk(envs[0], actions), walk(envs[1], mixed)
    for env in envs:
        env.close()
    same = np.array_equal(one.observations[:, 0], two.observations[:, 0]) and np.array_equal(
        one.rewards[:, 0], two.rewards[:, 0]
    )
    return judged(
        same,
        f"environment 0 {'does not notice' if same else 'notices'} what environment 1 does",
        "The environments share state (a class attribute, a module variable, one random generator): give each its own.",
    )


def dones(patient: Patient) -> Verdict:
    found = walked(patient, n_steps=20).dones
    sound = found.dtype == np.bool_ and found.shape[1:] == (2,)
    return judged(
        sound, f"dones are {found.dtype}, shape {found.shape[1:]}", "Return np.ndarray of bool, one per environment."
    )


def keeps_arrays(patient: Patient) -> Verdict:
    seen = walked(patient, n_steps=50)
    changed = sum(
        not np.array_equal(now, then, equal_nan=True)
        for now, then in zip(seen.returned, seen.observations, strict=True)
    )
    return judged(
        changed == 0,
        f"{changed} of 51 observations changed after they were returned",
        "Return a copy: the learner keeps what it saw, and a buffer that is written again rewrites the past.",
    )


def ends(patient: Patient) -> tuple[list[int], list[bool], list[dict[str, Any]]]:
    """Lengths of whole episodes, whether each was truncated, and the infos of their last steps."""
    seen = walked(patient, n_steps=LONGEST)
    lengths, cut, infos = [], [], []
    for n in range(seen.dones.shape[1]):
        begin = 0
        for t in np.flatnonzero(seen.dones[:, n]):
            lengths.append(int(t) - begin + 1)
            begin = int(t) + 1
            infos.append(seen.infos[t][n])
            cut.append(bool(infos[-1].get("TimeLimit.truncated", False)))
    return lengths, cut, infos


def truncation(patient: Patient) -> Verdict:
    lengths, cut, _ = ends(patient)
    if not lengths:
        return not_applicable(f"no episode ended in {LONGEST} steps")
    usual = max(set(lengths), key=lengths.count)
    share = lengths.count(usual) / len(lengths)
    figure = f"{len(lengths)} episodes, {sum(cut)} truncated, {share:.0%} of length {usual}"
    suspicious = len(lengths) >= 4 and share == 1.0 and not any(cut)
    return judged(
        not suspicious,
        figure,
        "All episodes end after the same number of steps and none is truncated: a time limit reported as death teaches "
        "the critic that life ends there. Return truncated=True (Gymnasium), or use its TimeLimit wrapper.",
    )


def terminal_observation(patient: Patient) -> Verdict:
    lengths, cut, infos = ends(patient)
    if not lengths:
        return not_applicable(f"no episode ended in {LONGEST} steps")
    missing = sum(1 for info in infos if "terminal_observation" not in info)
    broken = sum(1 for info in infos if not np.isfinite(np.asarray(info.get("terminal_observation", 0.0))).all())
    if missing or broken:
        return sick(
            f"{missing} of {len(infos)} episode ends without terminal_observation, {broken} not finite",
            "Put the last observation into that step's info, so that a truncated episode's value can be bootstrapped.",
        )
    return healthy(f"{len(infos)} episode ends, all with terminal_observation, {sum(cut)} truncated")


CHECKS = (
    Check("environment/spaces", "Do observations fit their space?", spaces),
    Check("environment/dones", "Is every done a bool, one per environment?", dones),
    Check("environment/finite", "Are observations and rewards finite?", finite),
    Check("environment/reward", "Is there any reward?", varied),
    Check("environment/seeding", "Does one seed give one course of events?", deterministic),
    Check("environment/isolation", "Do environments leave each other alone?", isolated),
    Check("environment/copies", "Do returned observations stay as they were?", keeps_arrays),
    Check("environment/truncation", "Is a time limit told apart from an end?", truncation),
    Check("environment/terminal_observation", "Is the last observation of an episode given?", terminal_observation),
)
