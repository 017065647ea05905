"""Settings of the adversary and of risk vary by their paths, and every agent that trains holds its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tailguard.adversary.training import Attacker
from tailguard.errors import ConfigError
from tailguard.population import segment as segment_module
from tailguard.population.config import PopulationConfig
from tailguard.population.scheduler import RunSegment
from tests.agents import logged
from tests.population.tiny import digest_of, tiny_population

OF_MODE = {"regulariser": "weight", "mixed": "ratio"}
"""What decides, beside epsilon, how much an adversary changes."""


def space(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "low": 0.1, "high": 0.9, "resample_probability": 0.5} for name in names]


def population(mode: str, *names: str) -> PopulationConfig:
    ppo = {"adversary": {"mode": mode, "ramp": 0.0, "steps": 1}, "risk": {"mode": "episode", "weight": 0.5}}
    return tiny_population(population_size=2, perturbation_interval=1, ppo=ppo, hyperparams=space(*names))


class Trained(NamedTuple):
    """A segment, and what the agent that trained in it held and did."""

    segment: RunSegment
    held: dict[str, Any]
    epsilon: float


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trained]:
    """Every segment that is trained, with the settings inside the parts that read them, looked at afterwards."""
    seen: list[Trained] = []
    original = segment_module.train

    def looked_at(agent: Any, segment: RunSegment, *rest: Any) -> Any:
        pace = original(agent, segment, *rest)
        assert isinstance(agent.adversary, Attacker)
        assert agent.learner.adversary is agent.adversary
        inside = {"adversary": agent.adversary.config, "risk": agent.risk.config}
        paths = {name: name.split(".") for name in segment.hyperparameters}
        held = {name: getattr(inside[part], setting) for name, (part, setting) in paths.items()}
        seen.append(Trained(segment, held, logged(agent)["adversary/epsilon"]))
        return pace

    monkeypatch.setattr(segment_module, "train", looked_at)
    return seen


@pytest.mark.parametrize("mode", OF_MODE)
def test_the_adversary_and_the_risk_of_a_copy_are_those_it_explores(
    mode: str, tmp_path: Path, trained: list[Trained]
) -> None:
    names = ("adversary.epsilon", f"adversary.{OF_MODE[mode]}", "risk.weight")
    digest_of(population(mode, *names), tmp_path)
    assert len(trained) == 6
    for one in trained:
        assert one.held == dict(one.segment.hyperparameters)
        assert one.epsilon == pytest.approx(one.held["adversary.epsilon"])
    copies = [one for one in trained if one.segment.source is not None]
    assert copies
    for copy in copies:
        before = next(
            one
            for one in trained
            if one.segment.round == copy.segment.round - 1 and one.segment.member == copy.segment.source
        )
        assert all(copy.held[name] != before.held[name] for name in names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adversary.epsilom", "no setting adversary.epsilom.*epsilon"),
        ("adversary.weight.start", "adversary.weight is 1.0 here"),
        ("risk.wieght", "no setting risk.wieght.*weight"),
        ("enemy.epsilon", "no setting enemy"),
    ],
)
def test_a_path_of_the_adversary_or_of_risk_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        population("regulariser", name)


def test_an_adversary_that_is_not_there_cannot_vary() -> None:
    with pytest.raises(ConfigError, match="adversary is None here"):
        tiny_population(hyperparams=space("adversary.epsilon"))
