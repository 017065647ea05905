"""Does a model of what settings earn explore better than chance? A Gaussian-process bandit in the manner of PB2
against perturbing and resampling, on problems that cost nothing to train.

    python -m benchmarks.explore [--seeds 40] [--write]

"Provably Efficient Online Hyperparameter Optimization with Population-Based Bandits" (2020): a Gaussian process over
(settings, time, score before) predicts the improvement of a segment; a copy takes the settings with the highest upper
confidence bound. Who copies whom is the same for both, so the difference is explore alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import exp, isfinite, log

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import markdown_table, write_section
from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler, PopulationMember
from tailguard.population.scheduler import Command, Report, RunSegment
from tailguard.population.space import Value

Array = NDArray[np.float64]
BANDIT, N_CANDIDATES, MOST_POINTS = 17, 300, 80


# the bandit


def unit(space: tuple[HyperparamConfig, ...], values: Mapping[str, Value]) -> Array:
    """Settings as a point of the unit cube, in logarithms where the space says so."""
    out = []
    for parameter in space:
        low, high = parameter.bounds
        x = float(values[parameter.name])
        out.append((log(x / low) / log(high / low)) if parameter.log else (x - low) / (high - low))
    return np.asarray(out)


def settings(space: tuple[HyperparamConfig, ...], point: Array) -> dict[str, Value]:
    """The inverse of `unit`."""
    out: dict[str, Value] = {}
    for parameter, x in zip(space, point, strict=True):
        low, high = parameter.bounds
        value = low * exp(x * log(high / low)) if parameter.log else low + x * (high - low)
        out[parameter.name] = parameter.fit(value)
    return out


@dataclass(frozen=True)
class Kernel:
    """Squared exponential in settings and score, forgetting in time."""

    length: float
    forget: float
    noise: float

    def __call__(self, a: Array, b: Array) -> Array:
        """Rows are (time, score before, settings...)."""
        apart = np.square(a[:, None, 1:] - b[None, :, 1:]).sum(-1) / self.length**2
        return np.exp(-0.5 * apart) * (1.0 - self.forget) ** (np.abs(a[:, None, 0] - b[None, :, 0]) / 2)


KERNELS = [Kernel(*choice) for choice in product((0.15, 0.4, 1.0), (0.0, 0.05, 0.2), (0.05, 0.4))]


class Process:
    """A Gaussian process on standardized improvements; the kernel with the highest marginal likelihood."""

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y = x, (y - y.mean()) / max(float(y.std()), 1e-9)
        self.kernel = max(KERNELS, key=self.log_likelihood)
        self.condition(self.x, self.y)

    def log_likelihood(self, kernel: Kernel) -> float:
        lower = np.linalg.cholesky(kernel(self.x, self.x) + (kernel.noise + 1e-6) * np.eye(len(self.x)))
        white = np.linalg.solve(lower, self.y)
        return float(-0.5 * white @ white - np.log(np.diag(lower)).sum())

    def condition(self, x: Array, y: Array) -> None:
        self.x, self.y = x, y
        gram = self.kernel(x, x) + (self.kernel.noise + 1e-6) * np.eye(len(x))
        self.inverse = np.linalg.inv(gram)

    def predict(self, x: Array) -> tuple[Array, Array]:
        across = self.kernel(x, self.x)
        mean = across @ self.inverse @ self.y
        variance = 1.0 - np.einsum("ij,jk,ik->i", across, self.inverse, across)
        return mean, np.sqrt(np.maximum(variance, 1e-12))


@dataclass
class Observation:
    round: int
    before: float
    point: Array
    gain: float


class BanditScheduler(PBTScheduler):
    """Explores where a Gaussian process sees the most to gain; until it has seen enough, by chance."""

    growth = 1.0  # of the confidence bound with time: the theory's

    def __init__(self, config: PBTConfig, n_rounds: int, seed: int) -> None:
        super().__init__(config, n_rounds, seed)
        self.seen: list[Observation] = []
        self.began: dict[int, float | None] = {}
        self.pending: dict[int, list[Array]] = {}

    def on_report(self, member: PopulationMember, event: Report) -> list[Command]:
        before = self.began.pop(member.index, None)
        if before is not None and isfinite(event.score):
            point = unit(self.config.hyperparams, member.hyperparameters)
            self.seen.append(Observation(event.round, before, point, event.score - before))
        return super().on_report(member, event)

    def go_on(self, member: PopulationMember, source: PopulationMember | None, next_round: int) -> RunSegment:
        self.began[member.index] = (source or member).score
        return super().go_on(member, source, next_round)

    def explored(self, source: PopulationMember, member: PopulationMember, next_round: int) -> dict[str, Value]:
        if len(self.seen) < 4:
            return super().explored(source, member, next_round)
        rng, space = self.rng(BANDIT, next_round, member.index), self.config.hyperparams
        seen = self.seen[-MOST_POINTS:]
        scores = np.asarray([o.before for o in seen] + [float(source.score or 0.0)])
        scaled = (scores - scores.min()) / max(float(np.ptp(scores)), 1e-9)
        x = np.asarray([[o.round, s, *o.point] for o, s in zip(seen, scaled, strict=False)])
        process = Process(x, np.asarray([o.gain for o in seen]))
        near = unit(space, source.hyperparameters) + rng.normal(0.0, 0.1, (N_CANDIDATES // 4, len(space)))
        points = np.clip(np.vstack([rng.random((N_CANDIDATES, len(space))), near]), 0.0, 1.0)
        asked = np.column_stack([np.full(len(points), next_round), np.full(len(points), scaled[-1]), points])
        taken = self.pending.setdefault(next_round, [])
        if taken:  # what others try in this round: its mean is expected, and nothing is left to learn there
            rows = np.asarray([[next_round, scaled[-1], *point] for point in taken])
            process.condition(np.vstack([process.x, rows]), np.concatenate([process.y, process.predict(rows)[0]]))
        mean, deviation = process.predict(asked)
        beta = 0.2 + self.growth * log(1 + next_round)
        chosen = points[int(np.argmax(mean + np.sqrt(beta) * deviation))]
        taken.append(chosen)
        return settings(space, chosen)


class CautiousBandit(BanditScheduler):
    """Trusts the mean more than the theory does: the trial must not hinge on one constant."""

    growth = 0.0


# the problems


@dataclass
class Problem:
    """A training that is a small array: `advance` is one segment, `quality` what counts, seen through noise."""

    space: tuple[HyperparamConfig, ...]
    start: Callable[[np.random.Generator], Array]
    advance: Callable[[Array, Mapping[str, Value], int, np.random.Generator], Array]
    quality: Callable[[Array], float]
    noise: float = 0.0
    rounds: int = 20
    places: dict[str, Array] = field(default_factory=dict)


def quadratic() -> Problem:
    """Figure 2 of the paper on population-based training."""

    def advance(place: Array, values: Mapping[str, Value], at: int, rng: np.random.Generator) -> Array:
        pull = np.asarray([float(values["h0"]), float(values["h1"])])
        return np.asarray(place * (1.0 - 0.04 * pull) ** 4)

    space = tuple(HyperparamConfig(name=name, low=0.0, high=1.0, perturb_step=0.1) for name in ("h0", "h1"))
    return Problem(space, lambda rng: np.full(2, 0.9), advance, lambda p: 1.2 - float(p @ p), rounds=12)


def descent(idle: int) -> Problem:
    """Stochastic gradient descent on a badly scaled bowl: the best rate falls with time. Some settings do nothing."""
    curvature = np.logspace(0, -2, 10)

    def advance(place: Array, values: Mapping[str, Value], at: int, rng: np.random.Generator) -> Array:
        weights, speed = place[:10].copy(), place[10:].copy()
        for _ in range(10):
            speed = float(values["momentum"]) * speed - curvature * weights - 0.3 * rng.normal(size=10)
            weights = np.clip(weights + float(values["rate"]) * speed, -1e3, 1e3)
        return np.concatenate([weights, speed])

    def quality(place: Array) -> float:
        return -log(float(curvature @ np.square(place[:10])) + 1e-12)

    space = (
        HyperparamConfig(name="rate", low=1e-4, high=3.0, log=True),
        HyperparamConfig(name="momentum", low=0.0, high=0.99),
        *(HyperparamConfig(name=f"idle{i}", low=0.0, high=1.0) for i in range(idle)),
    )
    return Problem(
        space, lambda rng: np.concatenate([rng.normal(size=10), np.zeros(10)]), advance, quality, 0.3, rounds=30
    )


def drift(dimensions: int) -> Problem:
    """Progress is fast only near settings that wander; scores are noisy."""
    phase = np.arange(dimensions) * 1.7

    def advance(place: Array, values: Mapping[str, Value], at: int, rng: np.random.Generator) -> Array:
        best = 0.5 + 0.3 * np.sin(phase + at / 8.0)
        x = np.asarray([float(values[f"x{i}"]) for i in range(dimensions)])
        return place + exp(-0.5 * float(np.square((x - best) / 0.2).sum()))

    space = tuple(HyperparamConfig(name=f"x{i}", low=0.0, high=1.0) for i in range(dimensions))
    return Problem(space, lambda rng: np.zeros(1), advance, lambda p: float(p[0]), 0.2, rounds=30)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "quadratic of the PBT paper": quadratic,
    "descent, rate and momentum": lambda: descent(0),
    "descent and 2 idle settings": lambda: descent(2),
    "drifting optimum, 2 settings": lambda: drift(2),
    "drifting optimum, 4 settings": lambda: drift(4),
}


def reached(make: Callable[[PBTConfig, int, int], PBTScheduler], problem: Problem, size: int, seed: int) -> float:
    """The quality of the member that the population calls its best."""
    config = PBTConfig(population_size=size, hyperparams=problem.space, perturbation_interval=1)
    scheduler = make(config, problem.rounds, seed)
    commands = scheduler.start()
    while commands:
        following: list[Command] = []
        for command in commands:
            assert isinstance(command, RunSegment)
            rng = np.random.default_rng((seed, 99, command.round, command.member))
            place = problem.places[command.bundle] if command.bundle is not None else problem.start(rng)
            name = f"{command.member}/{command.round}"
            problem.places[name] = problem.advance(place, command.hyperparameters, command.round, rng)
            score = problem.quality(problem.places[name]) + problem.noise * float(rng.normal())
            following += scheduler.handle(Report(command.member, command.round, score, name))
        commands = following
    assert scheduler.best is not None
    return problem.quality(problem.places[str(scheduler.best.bundle)])


def row(name: str, size: int, seeds: int) -> list[str]:
    """Mean quality by chance, and what each bandit adds to it, seed by seed, with its 95 % interval."""

    def qualities(make: Callable[[PBTConfig, int, int], PBTScheduler]) -> Array:
        return np.asarray([reached(make, PROBLEMS[name](), size, seed) for seed in range(seeds)])

    chance, cells = qualities(PBTScheduler), []
    for bandit in (BanditScheduler, CautiousBandit):
        gain = qualities(bandit) - chance
        half = 1.96 * float(gain.std(ddof=1)) / np.sqrt(seeds)
        cells.append(f"{gain.mean():+.3f} ± {half:.3f} ({(gain > 0).mean():.0%})")
    return [name, str(size), f"{chance.mean():.3f}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--sizes", default="2,4")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows = []
    for name in PROBLEMS:
        for size in arguments.sizes.split(","):
            rows.append(row(name, int(size), arguments.seeds))
            print(rows[-1], flush=True)
    header = ["problem", "members", "perturb and resample", "bandit adds", "cautious bandit adds"]
    body = (
        f"Quality of the member called best, mean of {arguments.seeds} seeds; what a bandit adds to it, paired, with "
        f"its 95 % interval and the share of seeds on which it wins.\n\n{markdown_table(header, rows)}"
    )
    print(body)
    if arguments.write:
        write_section("explore", "Explore: chance against a bandit", "python -m benchmarks.explore --write", body)


if __name__ == "__main__":
    main()
