"""What robust training buys and costs: InvertedPendulum under attack, the regime market under price noise, update time.

python -m benchmarks.robustness pendulum --seeds 0 1 2 3 4     train and attack; results are kept in runs/robustness
python -m benchmarks.robustness regime --seeds 0 1 2
python -m benchmarks.robustness cost
python -m benchmarks.robustness bound                          what any policy must lose on the regime market
python -m benchmarks.robustness --write                        tables from all that is kept, into RESULTS.md
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.results import markdown_table, write_section
from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.presets import regime
from tailguard.robustness import make_attack, play

Floats = NDArray[np.float64]

KEPT = Path("runs/robustness")
KINDS = ("nominal", "robust")
PENDULUM: dict[str, Any] = {
    "n_steps": 64,
    "n_epochs": 8,
    "ent_coef": 0.1,  # with a ceiling on the spread: it stays near 0.22, so the penalty's unit does not shrink
    "policy_kwargs": {"log_std_init": -1.5, "log_std_end": -1.5},
    "critic": {"twin": False, "n_quantiles": 16},
}
PENDULUM_ADVERSARY: dict[str, Any] = {"epsilon": 0.75, "weight": 0.007}
PENDULUM_STEPS = 262_144
PENDULUM_ATTACKS = (("mad", 0.75), ("critic", 0.75), ("random", 0.75), ("mad", 1.1), ("critic", 1.1))
REGIME_ADVERSARY: dict[str, Any] = {"epsilon": 0.1, "weight": 0.01}
REGIME_ATTACKS = (("price-random", 5.0), ("price", 5.0), ("price-learned", 5.0), ("mad", 0.1))
"""A return between two prices moved by 5 bps moves by 10 at most, 0.1 of its spread: the size of the last."""


@dataclass(frozen=True)
class Result:
    """One agent: what it earns per episode under every attack, by "name size"."""

    task: str
    kind: str
    seed: int
    returns: dict[str, float]
    cpu_seconds: float

    def keep(self) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{self.task}-{self.kind}-{self.seed}.json").write_text(json.dumps(self.__dict__))


def kept(task: str, kind: str) -> list[Result]:
    """Results of all seeds so far."""
    return [Result(**json.loads(path.read_text())) for path in sorted(KEPT.glob(f"{task}-{kind}-*.json"))]


def pendulum_env(n_envs: int, seed: int) -> VecEnv:
    return VecNormalize(make_vec_env("InvertedPendulum-v5", n_envs, seed=seed), norm_reward=False)


def train_pendulum(kind: str, seed: int, **changes: Any) -> DistributionalPPO:
    """262k steps; epsilon is in units of the normalized observations."""
    adversary = None if kind == "nominal" else {**PENDULUM_ADVERSARY, **changes}
    env = pendulum_env(16, seed)
    return DistributionalPPO("MlpPolicy", env, seed=seed, adversary=adversary, **PENDULUM).learn(PENDULUM_STEPS)


def attacked(agent: DistributionalPPO, attacks: Any, n_episodes: int, **options: Any) -> dict[str, float]:
    """Mean return per episode without and with each attack."""
    found = {"nobody": float(play(agent, make_attack("random", agent, 0.0), n_episodes, 7).returns.mean())}
    for name, size in attacks:
        extra = options if name.startswith("price") else {}
        attacker = make_attack(name, agent, size, 0, **extra)
        found[f"{name} {size:g}"] = float(play(agent, attacker, n_episodes, 7).returns.mean())
    return found


def in_other_episodes(agent: DistributionalPPO, env: VecEnv) -> DistributionalPPO:
    """The same agent with its statistics, in an environment it was not trained in."""
    agent.set_env(env)
    return agent


def run_pendulum(kind: str, seed: int) -> Result:
    began = time.process_time()
    agent = in_other_episodes(train_pendulum(kind, seed), pendulum_env(16, 1_000 + seed))
    cpu = time.process_time() - began
    return Result("pendulum", kind, seed, attacked(agent, PENDULUM_ATTACKS, 16), cpu)


def train_regime(kind: str, seed: int, **changes: Any) -> DistributionalPPO:
    """The preset as it is, or with an adversary on its returns."""
    preset = regime()
    adversary = None if kind == "nominal" else {**REGIME_ADVERSARY, **changes}
    env = oracle_env(preset.market, preset.n_envs, seed)
    config = preset.config.replace(adversary=adversary)
    return DistributionalPPO("MlpLstmPolicy", env, config=config, seed=seed).learn(preset.total_timesteps)


def run_regime(kind: str, seed: int) -> Result:
    began = time.process_time()
    agent = train_regime(kind, seed)
    cpu = time.process_time() - began
    market = regime().market
    in_other_episodes(agent, oracle_env(market, 64, 1_000_000 + seed, n_bars=200_000))
    return Result("regime", kind, seed, attacked(agent, REGIME_ATTACKS, 256, features=market.features), cpu)


def cost(repeats: int = 7) -> dict[str, float]:
    """CPU time of an update with the penalty of 3 steps over that of plain training, interleaved; medians."""
    preset = regime()
    agents = {}
    for name, adversary in (("plain", None), ("regulariser, 3 steps", {"epsilon": 0.1, "ramp": 0.0}), ("off", None)):
        env = oracle_env(preset.market, preset.n_envs, 0, n_bars=20_000)
        config = preset.config.replace(adversary=adversary, update_threads=1)
        agents[name] = DistributionalPPO("MlpLstmPolicy", env, config=config, seed=0)
        agents[name].learn(preset.n_envs * preset.config.n_steps)  # compile, and fill the buffer
    times: dict[str, list[float]] = {name: [] for name in agents}
    for _ in range(repeats):
        for name, agent in agents.items():
            began = time.process_time()
            agent.train()
            times[name].append(time.process_time() - began)
    plain = float(np.median(times["plain"]))
    return {name: float(np.median(found)) / plain for name, found in times.items()}


# what an attack takes from everybody


def bound(n_paths: int = 4_000, n_bars: int = 1_500) -> dict[str, dict[str, float]]:
    """Basis points per bar on the regime market, of who knows its constants: unharmed, and under two attacks.

    The attacker knows the regime and moves returns, or prices, against it. `unaware`: the best policy without attack;
    `best reply`: the best there is against this very attack, by drift that is assumed and by caution before trading.
    """
    market = regime().market
    drift, spread, cost = market.drift_bps * 1e-4, market.volatility, market.cost
    rng = np.random.default_rng(0)
    turns = rng.random((n_bars, n_paths)) < market.switch_probability
    hidden = np.where(np.cumsum(turns, axis=0) % 2, -1.0, 1.0) * rng.choice([-1.0, 1.0], n_paths)  # (T, N)
    returns = drift * hidden + spread * rng.normal(size=hidden.shape)
    lie = -5e-4 * hidden
    shown = {
        "nobody": returns,
        "returns moved by 0.1 of their spread": returns - 0.1 * spread * hidden,
        "prices moved by 5 bps": returns + lie - np.concatenate([lie[:1], lie[:-1]]),
    }
    replies = [(assumed * 1e-4, caution) for assumed in (15, 20, 25, 30) for caution in (0.1, 0.3, 0.6, 0.9, 1.2)]

    def earned(seen: Floats, reply: tuple[float, float]) -> float:
        return 1e4 * filtered(seen, returns, reply, market.switch_probability, spread, cost)

    unaware = max(replies, key=lambda reply: earned(returns, reply))
    return {
        name: {"unaware": earned(seen, unaware), "best reply": max(earned(seen, reply) for reply in replies)}
        for name, seen in shown.items()
    }


def filtered(
    seen: Floats, returns: Floats, reply: tuple[float, float], switch: float, spread: float, cost: float
) -> float:
    """Mean reward per bar of a Bayesian who trades when the odds (in logarithms) of a regime pass its caution."""
    assumed, caution = reply
    odds, weight, total = np.zeros(seen.shape[1]), np.zeros(seen.shape[1]), 0.0
    for bar in range(len(seen) - 1):
        belief = 1.0 / (1.0 + np.exp(-odds - 2.0 * assumed * seen[bar] / spread**2))
        belief = belief * (1.0 - switch) + (1.0 - belief) * switch
        odds = np.log(belief / (1.0 - belief))
        wanted = np.where(np.abs(odds) > caution, np.sign(odds), weight)
        total += float((wanted * returns[bar + 1] - cost * np.abs(wanted - weight)).mean())
        weight = wanted
    return total / (len(seen) - 1)


def median_table(task: str) -> str:
    """Per kind of training: what the median agent has left, attack by attack, and over the strongest of them."""
    rows = []
    for kind in KINDS:
        found = kept(task, kind)
        if not found:
            continue
        names = list(found[0].returns)
        rows.append([kind, str(len(found)), *(f"{np.median([r.returns[n] for r in found]):.4g}" for n in names)])
    header = ["training", "seeds", *(kept(task, "nominal") or kept(task, "robust"))[0].returns]
    return markdown_table(header, rows)


def loss_table(task: str) -> str:
    """Per kind of training: what attacks cost the median agent of what it earns without one, and the strongest one."""
    rows = []
    for kind in KINDS:
        losses = [losses_of(found) for found in kept(task, kind)]
        if losses:
            figures = [np.median([loss[name] for loss in losses]) for name in losses[0]]
            rows.append([kind, str(len(losses)), *(f"{figure:.2%}" for figure in figures)])
    return markdown_table(["lost by", "seeds", *losses_of(kept(task, "nominal")[0])], rows)


def losses_of(found: Result) -> dict[str, float]:
    """Share of the unharmed return that each attack costs; "prices" is the strongest of those on prices."""
    clean = found.returns["nobody"]
    losses = {name: 1.0 - left / clean for name, left in found.returns.items() if name != "nobody"}
    prices = [loss for name, loss in losses.items() if name.startswith("price")]
    return {**losses, **({"strongest of prices": max(prices)} if prices else {})}


def write() -> None:
    """All tables that there are results for."""
    parts = []
    tasks = {
        "pendulum": f"InvertedPendulum-v5, {PENDULUM_STEPS:,} steps, adversary={PENDULUM_ADVERSARY}",
        "regime": f"`regime`, the preset's settings, adversary={REGIME_ADVERSARY}",
    }
    for task, words in tasks.items():
        if kept(task, "nominal"):
            parts += [f"{words}. Mean return of an episode under each attack, median over seeds.", median_table(task)]
    if kept("regime", "nominal"):
        parts += ["What that costs on `regime`, agent by agent, median over seeds.", loss_table("regime")]
    if (KEPT / "bound.json").exists():
        found = json.loads((KEPT / "bound.json").read_text())
        rows = [[name, *(f"{figure:.2f}" for figure in figures.values())] for name, figures in found.items()]
        words = (
            "What an attacker who knows the regime takes from everybody, in basis points per bar: from a Bayesian who "
            "knows the market and not the attack (`unaware`), and from the best reply to this very attack."
        )
        parts += [words, markdown_table(["attack", "unaware", "best reply"], rows)]
    if (KEPT / "cost.json").exists():
        found = json.loads((KEPT / "cost.json").read_text())
        rows = [[name, f"{ratio:.2f}"] for name, ratio in found.items()]
        words = "CPU time of an update of the `regime` preset over plain training, interleaved, medians."
        parts += [words, markdown_table(["adversary", "ratio"], rows)]
    write_section("robustness", "Robust training", "make bench-robustness", "\n\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("pendulum", "regime", "cost", "bound"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.what in ("cost", "bound"):
        KEPT.mkdir(parents=True, exist_ok=True)
        file = KEPT / f"{given.what}.json"
        file.write_text(json.dumps({"cost": cost, "bound": bound}[given.what]()))
        print(file.read_text())
    elif given.what is not None:
        run = {"pendulum": run_pendulum, "regime": run_regime}[given.what]
        for seed in given.seeds:
            for kind in given.kinds:
                result = run(kind, seed)
                result.keep()
                print(result, flush=True)
    if given.write:
        write()


if __name__ == "__main__":
    main()
