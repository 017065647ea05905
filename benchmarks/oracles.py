"""Fraction of the optimum on the oracle markets: presets and variants of them, several seeds, interquartile means.

python -m benchmarks.oracles                      the table of presets, ours with and without memory
python -m benchmarks.oracles --ab                 the A/B that decides defaults: optimizers, VGS, aggregation
python -m benchmarks.oracles --memoryless         MlpPolicy, which can use the weight it holds as a memory
python -m benchmarks.oracles --memoryless --blind the same where nobody shows it that weight
python -m benchmarks.oracles --peers              sb3-contrib's RecurrentPPO on the same environment and steps
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.results import kept_rows, markdown_table, write_section
from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.presets import Preset, preset

AB: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "adam"},
    "AdamW, decay 0.01": {"optimizer": "adamw", "optimizer_kwargs": {"weight_decay": 0.01}},
    "AdaptiveUPGD, sigma 1e-3": {"optimizer": "adaptive_upgd"},
    "Adam + VGS": {"optimizer": "adam", "vgs": {"alpha": 0.1}},
    "AdaptiveUPGD + VGS": {"optimizer": "adaptive_upgd", "vgs": {"alpha": 0.1}},
    "Adam, min of twin critics": {"optimizer": "adam", "critic": {"aggregation": "min"}},
    "Adam, single critic": {"optimizer": "adam", "critic": {"twin": False}},
}


def ours(name: str, policy: str, changes: dict[str, Any], steps: int | None, seed: int) -> dict[str, float]:
    """One seed: fraction of the optimum, reward per bar, seconds of CPU, alerts raised."""
    chosen = varied(preset(name), changes, steps)
    agent = chosen.agent(seed, policy)
    heard = alerts_of(agent)
    found = scored(chosen, lambda: agent.learn(chosen.total_timesteps), seed)
    return {**found, "alerts": len(heard)}


def alerts_of(agent: DistributionalPPO) -> list[str]:
    """Names of the alerts that the agent will raise, as they come."""
    heard: list[str] = []
    agent.alerts.listeners.append(lambda alert, value: heard.append(alert.name))
    return heard


class MarketOnly:
    """An agent that is shown what the market shows, and nothing of its account."""

    def __init__(self, agent: DistributionalPPO) -> None:
        self.agent = agent

    def predict(self, observation: np.ndarray, *memory: Any, **options: Any) -> Any:
        columns = self.agent.policy.obs_features
        return self.agent.predict(observation[:, :columns], *memory, **options)


def blind(name: str, policy: str, changes: dict[str, Any], steps: int | None, seed: int) -> dict[str, float]:
    """The same, trained and examined without seeing the weight held."""
    chosen = varied(preset(name), changes, steps)
    config = chosen.env_config.replace(agent_state=())
    env = oracle_env(chosen.market, chosen.n_envs, seed, config=config)
    agent = DistributionalPPO(policy, env, config=chosen.config, policy_kwargs=chosen.policy_kwargs, seed=seed)
    return scored(chosen, lambda: MarketOnly(agent.learn(chosen.total_timesteps)), seed)


def scored(chosen: Preset, train: Callable[[], Any], seed: int) -> dict[str, float]:
    """What a trained agent earns out of sample, and the CPU time its training took."""
    began = time.process_time()
    agent = train()
    seconds = time.process_time() - began
    result = chosen.score(agent, seed)
    return {
        "fraction": result.fraction,
        "bps": result.reward_per_step * 1e4,
        "stderr": result.stderr * 1e4,
        "cpu": seconds,
    }


def varied(chosen: Preset, changes: dict[str, Any], steps: int | None) -> Preset:
    return replace(chosen, config=chosen.config.replace(**changes), total_timesteps=steps or chosen.total_timesteps)


def make_recurrent_ppo(chosen: Preset, seed: int) -> Any:
    """RecurrentPPO with the same widths, rollouts, epochs, batch and rate schedule on the same environment."""
    import torch
    from sb3_contrib import RecurrentPPO

    torch.set_num_threads(1)
    config = chosen.config
    return RecurrentPPO(
        "MlpLstmPolicy",
        oracle_env(chosen.market, chosen.n_envs, seed, config=chosen.env_config),
        learning_rate=lambda remaining: config.learning_rate.at(1.0 - remaining),  # type: ignore[union-attr]
        n_steps=config.n_steps,
        batch_size=config.n_steps * chosen.n_envs // 4,
        n_epochs=config.n_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        policy_kwargs={"lstm_hidden_size": 64},
        seed=seed,
        device="cpu",
    )


def recurrent_ppo(name: str, policy: str, changes: dict[str, Any], steps: int | None, seed: int) -> dict[str, float]:
    """The same of RecurrentPPO."""
    chosen = varied(preset(name), {}, steps)
    model = make_recurrent_ppo(chosen, seed)
    return scored(chosen, lambda: model.learn(chosen.total_timesteps), seed)


def over_seeds(
    run: Callable[..., dict[str, float]], seeds: int, workers: int, *arguments: Any
) -> dict[str, np.ndarray]:
    """All seeds, in that many processes at once."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        rows = list(pool.map(run, *([argument] * seeds for argument in arguments), range(seeds)))
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def interquartile_mean(values: np.ndarray) -> float:
    """Mean without the lowest and the highest quarter."""
    ordered = np.sort(values)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(values: np.ndarray) -> str:
    """IQM with a bootstrap interval of 95 % over seeds."""
    rng = np.random.default_rng(0)
    draws = [interquartile_mean(rng.choice(values, len(values))) for _ in range(2000)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{interquartile_mean(values):.3f} ({low:.3f} to {high:.3f})"


def row(label: str, found: dict[str, np.ndarray]) -> list[str]:
    cells = [label, interval(found["fraction"]) if np.isfinite(found["fraction"]).all() else "optimum is 0"]
    alerts = f"{found['alerts'].sum():.0f}" if "alerts" in found else "not counted"
    return [*cells, interval(found["bps"]), f"{np.median(found['cpu']):.0f}", alerts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes at once; one per core by default"
    )
    parser.add_argument("--steps", type=int, help="steps per seed; the preset's own by default")
    parser.add_argument("--markets", default="regime,signal,noise,pairs", help="presets, by commas")
    parser.add_argument("--ab", action="store_true", help="variants of the learner instead of the table of presets")
    parser.add_argument("--peers", action="store_true", help="RecurrentPPO instead of ours")
    parser.add_argument("--only", help="with --ab: labels that contain this")
    parser.add_argument("--memoryless", action="store_true", help="MlpPolicy instead of MlpLstmPolicy")
    parser.add_argument("--blind", action="store_true", help="do not show the agent the weight it holds")
    options = parser.parse_args()
    rows = []
    for name in options.markets.split(","):
        variants = AB if options.ab else {"MlpPolicy" if options.memoryless else "MlpLstmPolicy": {}}
        for label, changes in variants.items():
            if options.only and options.only not in label:
                continue
            policy = "MlpPolicy" if options.memoryless else "MlpLstmPolicy"
            run = recurrent_ppo if options.peers else blind if options.blind else ours
            found = over_seeds(run, options.seeds, options.workers, name, policy, changes, options.steps)
            who = "RecurrentPPO" if options.peers else f"{label}, weight not shown" if options.blind else label
            rows.append(row(f"{name}, {who}", found))
            print(rows[-1], flush=True)
    kind = "ab" if options.ab else "presets"
    header = ["market, agent", "fraction of the optimum", "bps per bar out of sample", "CPU s per seed", "alerts"]
    table = markdown_table(header, kept_rows(f"oracles-{kind}", rows))
    command = " ".join(["python -m benchmarks.oracles", *sys.argv[1:]])
    what = (
        f"{options.seeds} seeds, interquartile mean (95 % bootstrap interval over seeds), deterministic policy, fresh "
        "draw of the market. Alerts: raised in all of these trainings together. The command is that of the newest rows."
    )
    write_section(f"oracles-{kind}", f"Oracle markets: {kind}", command, f"{what}\n\n{table}")


if __name__ == "__main__":
    main()
