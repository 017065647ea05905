"""The attack bench: return, CVaR and change of the action against the size of the perturbation, for each attack.

bench = attack_agent(load, AttackConfig())       # load(seed) gives the agent in an environment of its own
bench.to_json()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tailguard.adversary.interval import Lies, action_change_bound, has_bounds
from tailguard.configuration import Config, Fraction, NonNegativeFloat, PositiveInt, Seed, Several
from tailguard.errors import ConfigError
from tailguard.evaluation.attack_record import FORMAT, AttackRecord, Bound, Curve, Point
from tailguard.ppo import DistributionalPPO
from tailguard.robustness.attacks import Attack, attack_named, ball_around, make_attack, nobody
from tailguard.robustness.play import Moment, Played, Victim, play
from tailguard.robustness.prices import Features

Load = Callable[[int], DistributionalPPO]
"""From a seed to the agent in fresh episodes of that seed."""
Say = Callable[[str], object]
Row = Callable[[str, str, Point], object]
"""Told the name and unit of an attack, and what it left at one size."""

BOUND_STEPS = 64
"""Steps of the unharmed path at which the bound is proven."""


class AttackConfig(Config):
    """What is tried."""

    attacks: tuple[str, ...] = ("random", "critic", "mad")
    """By name."""
    epsilons: tuple[NonNegativeFloat, ...] = (0.05, 0.1, 0.2)
    """Sizes of attacks on observations, in units of what the policy sees."""
    bps: tuple[NonNegativeFloat, ...] = (1.0, 5.0, 20.0)
    """Sizes of attacks on prices."""
    seeds: Several = 3
    """Draws of episodes, each attacked by itself."""
    first_seed: Seed = 0
    episodes: PositiveInt = 32
    """Per attack, size and seed."""
    alpha: Fraction = 0.05
    """Tail share of CVaR over episodes."""
    steps: PositiveInt = 65_536
    """That a learned attacker is trained for, per size and seed."""


def attack_agent(
    load: Load,
    config: AttackConfig,
    features: Features | None = None,
    say: Say = lambda text: None,
    row: Row = lambda name, unit, point: None,
    kept: MutableMapping[str, Played] | None = None,
) -> AttackRecord:
    """Every attack at every size on every seed.

    features: computes what a market agent is shown from bars
    say:      is told after every attack, size and seed
    row:      is given a point of a curve as soon as all its seeds are done
    kept:     episodes that were played before, by attack, size and seed: they are not played again
    """
    kept = {} if kept is None else kept
    attacks = [attack_named(name) for name in config.attacks]
    if not attacks:
        raise ConfigError("No attack is named. Give at least one, such as mad.")
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    unharmed = [
        once(kept, f"nobody/0/{seed}/{config.episodes}", lambda s=seed: play(load(s), nobody, config.episodes, s))  # type: ignore[misc]
        for seed in seeds
    ]
    clean = point_of(0.0, unharmed, config.alpha)
    say("nobody")
    row("nobody", "", clean)
    curves = [
        Curve(each.name, each.unit, each.meaning, (clean, *points_of(each, load, config, features, say, row, kept)))
        for each in attacks
    ]
    bounds = bounds_of(load(config.first_seed), config)
    return AttackRecord(config.alpha, config.seeds, config.episodes, tuple(curves), bounds)


def once(kept: MutableMapping[str, Played], key: str, played: Callable[[], Played]) -> Played:
    """What was kept under a key, or what is played now and kept."""
    if key not in kept:
        kept[key] = played()
    return kept[key]


def points_of(
    attack: Attack,
    load: Load,
    config: AttackConfig,
    features: Features | None,
    say: Say,
    row: Row,
    kept: MutableMapping[str, Played],
) -> Iterator[Point]:
    """One attack at every size."""
    options: dict[str, Any] = {"steps": config.steps} if attack.learned else {}
    options |= {"features": features} if attack.of_prices else {}
    for size in sorted(set(config.bps if attack.of_prices else config.epsilons) - {0.0}):
        played = []
        for seed in range(config.first_seed, config.first_seed + config.seeds):

            def attacked(size: float = size, seed: int = seed) -> Played:
                agent = load(seed)
                attacker = make_attack(attack.name, agent, size, seed, **options)
                return play(agent, attacker, config.episodes, seed)

            trained = f"/{config.steps}" if attack.learned else ""
            played.append(once(kept, f"{attack.name}/{size!r}/{seed}/{config.episodes}{trained}", attacked))
            say(f"{attack.name} {size:g}")
        point = point_of(size, played, config.alpha)
        row(attack.name, attack.unit, point)
        yield point


def point_of(size: float, played: list[Played], alpha: float) -> Point:
    """Figures over all seeds, and the mean return of each."""
    returns = np.concatenate([one.returns for one in played])
    return Point(
        epsilon=size,
        mean_return=float(returns.mean()),
        cvar=float(np.mean([one.cvar(alpha) for one in played])),
        change=float(np.mean([one.change for one in played])),
        by_seed=tuple(float(one.returns.mean()) for one in played),
    )


def bounds_of(agent: DistributionalPPO, config: AttackConfig) -> tuple[Bound, ...]:
    """Proven at small sizes, where a bound still says something; none where the policy has no such bound."""
    smallest = min((size for size in config.epsilons if size > 0.0), default=0.05)
    if not has_bounds(agent.policy):
        return ()
    path = clean_path(agent, config.first_seed)
    return tuple(
        bound_of(agent, path, share * smallest, always) for always in (False, True) for share in (0.01, 0.1, 1.0)
    )


def clean_path(agent: DistributionalPPO, seed: int) -> list[Moment]:
    """The first steps of unharmed episodes."""
    victim = Victim(agent)
    victim.env.seed(seed)
    victim.reset()
    path = []
    for _ in range(BOUND_STEPS):
        path.append(victim.moment())
        victim.step(path[-1], path[-1].observations)
    return path


def bound_of(agent: DistributionalPPO, path: list[Moment], size: float, always: bool) -> Bound:
    """How far any perturbation of this size can move the actions of a path: proven."""
    radius = ball_around(agent, size).sizes
    lies = Lies([moment.observations for moment in path], [moment.starts for moment in path], radius, always)
    change, width = action_change_bound(agent.policy, lies)
    return Bound(size, always, BOUND_STEPS, float(np.mean(change)), float(np.max(change)), width)


def write_record(record: AttackRecord, path: Path) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **asdict(record)}, indent=1), encoding="utf-8")
