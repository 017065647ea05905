"""K6: every agent that can be built trains, is saved, loaded, acts and trains on with the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tailguard.errors import ConfigError
from tests.random_agents import Settings, random_settings

N_FAST, N_SLOW = 30, 300


@pytest.mark.parametrize("number", range(N_FAST))
def test_an_agent_of_random_settings_goes_on_as_it_was_saved(tmp_path: Path, number: int) -> None:
    whole_life(number, largest=12, place=tmp_path / "agent")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(N_FAST, N_FAST + N_SLOW))
def test_an_agent_of_random_settings_and_sizes_goes_on_as_it_was_saved(tmp_path: Path, number: int) -> None:
    whole_life(number, largest=300, place=tmp_path / "agent")


def test_most_random_settings_are_accepted() -> None:
    refused = [reason for number in range(20) for reason in accepted(Random(number), 6)[2]]
    assert len(refused) < 20, refused


def whole_life(number: int, largest: int, place: Path) -> None:
    """Build, train, save, load, act, train on."""
    settings, agent, _ = accepted(Random(number), largest)
    rollout = settings.n_envs * agent.config.n_steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings that go badly together
        agent.learn(rollout)
        agent.save(place)
        twin = DistributionalPPO.load(place, env=settings.env(0))
        assert state_digest(states(twin)) == state_digest(states(agent))
        assert acts(twin, settings) == acts(agent, settings)
        for each in (agent, twin):
            each.set_env(settings.env(5))
            each.learn(rollout, reset_num_timesteps=False)
    assert twin.num_timesteps == 2 * rollout
    assert state_digest(states(twin)) == state_digest(states(agent))


def accepted(rng: Random, largest: int) -> tuple[Settings, DistributionalPPO, list[str]]:
    """The first settings that an agent can be built from, that agent, and why those before were refused."""
    refused: list[str] = []
    while True:
        settings = random_settings(rng, largest)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return settings, settings.agent(), refused
        except ConfigError as error:  # nothing else is a refusal
            refused.append(str(error))


def states(agent: DistributionalPPO) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in agent.parts().items()}


def acts(agent: DistributionalPPO, settings: Settings) -> list[Any]:
    """Actions of an episode's first steps, drawn and most likely, and what the critics say."""
    rng, seen = np.random.default_rng(0), []
    torch.manual_seed(0)
    state: Any = None
    for step in range(3):
        obs = rng.normal(size=(2, settings.n_features)).astype(np.float32)
        starts = np.full(2, step == 0)
        drawn, _ = agent.predict(obs, state, starts)
        action, after = agent.predict(obs, state, starts, deterministic=True)
        seen += [drawn.tolist(), action.tolist(), agent.predict_quantiles(obs, state, starts).tolist()]
        state = after
    return seen
