"""Where the time of a rollout and an update goes."""

from __future__ import annotations

import time

from tailguard.doctor.checks import Check, Verdict, healthy
from tailguard.doctor.patient import Patient


def profile(patient: Patient) -> Verdict:
    """Never fails: speed is a figure, not a property."""
    agent = patient.agent(patient.env(patient.n_envs))
    env = agent.env
    assert env is not None  # noqa: S101 (built with one)
    spent = {"environment": 0.0, "update": 0.0}

    def timed(owner: object, method: str, name: str) -> None:
        original = getattr(owner, method)

        def measured(*args: object, **kwargs: object) -> object:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        setattr(owner, method, measured)

    per_update = agent.config.n_steps * agent.n_envs
    agent.learn(per_update)
    timed(env, "step", "environment")
    timed(agent, "train", "update")
    began = time.perf_counter()
    agent.learn(2 * per_update)
    total = time.perf_counter() - began
    acting = max(total - sum(spent.values()), 0.0)
    shares = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in {**spent, "acting and evaluating": acting}.items()
    )
    return healthy(f"{2 * per_update / total:,.0f} steps per second: {shares}; updates run on {agent.update_runs_on}")


CHECKS = (Check("speed/profile", "Where does the time go?", profile),)
