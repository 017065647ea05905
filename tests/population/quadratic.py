"""The toy problem of "Population Based Training of Neural Networks" (2017), figure 2, driven by our scheduler.

Q = 1.2 - a^2 - b^2 is what counts; a worker can only climb 1.2 - h0 a^2 - h1 b^2. With h = (1, 0) and (0, 1) neither
worker alone can exceed 0.39: only copying the other's place and changing h can.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler
from tailguard.population.scheduler import Report, RunSegment

LEARNING_RATE, STEPS, INTERVAL = 0.02, 200, 4


@dataclass
class Quadratic:
    """Places by bundle name: a segment reads one and writes one, as a real segment does."""

    places: dict[str, tuple[float, float]]

    def train(self, segment: RunSegment) -> Report:
        a, b = self.places[segment.bundle] if segment.bundle is not None else (0.9, 0.9)
        h0, h1 = float(segment.hyperparameters["h0"]), float(segment.hyperparameters["h1"])
        for _ in range(segment.updates):
            a, b = a - LEARNING_RATE * 2.0 * h0 * a, b - LEARNING_RATE * 2.0 * h1 * b
        name = f"{segment.member}/{segment.round}"
        self.places[name] = (a, b)
        return Report(segment.member, segment.round, 1.2 - a * a - b * b, name)


def space(**explore: object) -> tuple[HyperparamConfig, ...]:
    return tuple(HyperparamConfig(name=name, low=0.0, high=1.0, **explore) for name in ("h0", "h1"))


def best_of_two_workers(seed: int, hyperparams: tuple[HyperparamConfig, ...]) -> float:
    """Q reached by the better of two workers after 200 steps."""
    config = PBTConfig(population_size=2, hyperparams=hyperparams, perturbation_interval=INTERVAL)
    initial = [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    scheduler = PBTScheduler(config, n_rounds=STEPS // INTERVAL, seed=seed, initial=initial)
    problem, commands = Quadratic({}), scheduler.start()
    while commands:
        commands = [
            following
            for command in commands
            if isinstance(command, RunSegment)
            for following in scheduler.handle(problem.train(command))
        ]
    assert scheduler.best is not None
    assert scheduler.best.score is not None
    return scheduler.best.score
