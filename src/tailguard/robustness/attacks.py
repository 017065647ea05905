"""Attacks on what an agent sees, one step at a time: nobody can look ahead.

random    anywhere in the ball
critic    where the agent's own critics see the least value
mad       where the action law is furthest from the unharmed one (maximal action difference)
learned   by a policy of its own, trained on the negative reward (learned.py)
price-random, price   the bars themselves, features recomputed (prices.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.adversary import (
    Ball,
    Scene,
    Search,
    attackable_features,
    feature_sizes,
    frozen,
    observation_bounds,
    worst_case,
)
from tailguard.errors import ConfigError, did_you_mean
from tailguard.ppo import DistributionalPPO
from tailguard.robustness.play import Attacker, Moment

STRONG = Search("pgd", 10, 0.25, 3)
"""What an evaluation searches with."""


@dataclass(frozen=True)
class Attack:
    """A way to attack: how its size is measured, what it does, and whether it needs bars."""

    name: str
    unit: str
    meaning: str
    of_prices: bool = False
    learned: bool = False


ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack("random", "normalized", "anywhere in the ball"),
        Attack("critic", "normalized", "where the agent's critics see the least value"),
        Attack("mad", "normalized", "where the action is furthest from the unharmed one"),
        Attack("learned", "normalized", "by a policy trained on the negative reward", learned=True),
        Attack("price-random", "bps", "prices of every bar moved at random, features recomputed", of_prices=True),
        Attack("price", "bps", "prices of every bar moved to change the action most", of_prices=True),
        Attack("price-learned", "bps", "prices moved by a policy trained on the negative reward", True, True),
    )
}


def attack_named(name: str) -> Attack:
    """The attack of that name."""
    if name not in ATTACKS:
        raise ConfigError(f"There is no attack {name!r}.{did_you_mean(name, ATTACKS)} Known: {', '.join(ATTACKS)}.")
    return ATTACKS[name]


def ball_around(agent: DistributionalPPO, epsilon: float) -> Ball:
    """What an attack of size epsilon may do to what this agent sees: masks and scales are those of its training."""
    env, config = agent.get_env(), agent.config.adversary
    scales, spare = (config.scales, config.spare) if config is not None else (None, ())
    attackable = attackable_features(env) if env is not None else None
    sizes = epsilon * feature_sizes(agent.policy.obs_features, scales, spare, attackable)
    ball = Ball(torch.from_numpy(sizes.astype(np.float32)), config.norm if config is not None else "linf")
    bounds = observation_bounds(agent.observation_space, agent.obs_stats)
    return ball if bounds is None else ball.within((torch.from_numpy(bounds[0]), torch.from_numpy(bounds[1])))


def scene_of(moment: Moment) -> Scene:
    """One step as a sequence of length one."""
    n = len(moment.starts)
    return Scene(moment.observations.unsqueeze(0), moment.layout, moment.memory, torch.ones(1, n, dtype=torch.bool))


def nobody(moment: Moment) -> Tensor:
    """The truth."""
    return moment.observations


class RandomAttack:
    """Anywhere in the ball, evenly."""

    def __init__(self, agent: DistributionalPPO, epsilon: float, seed: int) -> None:
        self.policy, self.ball = agent.policy, ball_around(agent, epsilon)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, moment: Moment) -> Tensor:
        unit = self.ball.draw(moment.observations.shape, self.generator)
        return self.ball.moved(moment.observations, unit)


class MaximalDifference(RandomAttack):
    """Where the action law is furthest from the one of an agent to whom nobody ever lied."""

    search = STRONG

    def objective(self, moment: Moment, scene: Scene) -> Callable[[Tensor], Tensor]:
        head = self.policy.action_head
        return lambda seen: head.divergence(moment.unharmed.unsqueeze(0), scene.parameters(self.policy, seen))

    def __call__(self, moment: Moment) -> Tensor:
        scene = scene_of(moment)
        with frozen(self.policy):
            return worst_case(self.objective(moment, scene), scene, self.ball, self.search, self.generator)[0]


class LeastValue(MaximalDifference):
    """Where the agent's own critics, which know the truth so far, see the least value."""

    def objective(self, moment: Moment, scene: Scene) -> Callable[[Tensor], Tensor]:
        pairs = list(zip(self.policy.critic_list, moment.critic_memories, strict=True))

        def loss(seen: Tensor) -> Tensor:
            laws = [critic.head.quantiles(critic(seen, scene.layout, memory)) for critic, memory in pairs]
            return -(self.policy.aggregate(laws) @ self.policy.masses)

        return loss


KINDS: dict[str, Callable[..., Attacker]] = {"random": RandomAttack, "mad": MaximalDifference, "critic": LeastValue}


def make_attack(name: str, agent: DistributionalPPO, epsilon: float, seed: int = 0, **options: Any) -> Attacker:
    """The attacker of that name and size against an agent in its environment; learned ones are trained here.

    options: `steps` that a learned attacker is trained for
    """
    attack = attack_named(name)
    if epsilon == 0.0:
        return nobody
    if attack.of_prices:
        from tailguard.robustness.prices import price_attack  # the market half is asked only where there are prices

        return price_attack(name, agent, epsilon, seed, **options)
    if attack.learned:
        from tailguard.robustness.learned import train_attacker

        return train_attacker(agent, ball_around(agent, epsilon), seed, **options)
    return KINDS[name](agent, epsilon, seed)
