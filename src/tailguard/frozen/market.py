"""The market of a contract: what a frozen policy must be shown of bars, and what its account may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tailguard.env import TradingVecEnv, oracle_env
from tailguard.examination import remembered, require_bars_of_training
from tailguard.experiment import DataTask, Experiment, PresetTask
from tailguard.market.features import FeatureSet
from tailguard.ppo import DistributionalPPO
from tailguard.run import RunFolder

N_BARS = 2_000
"""Of an embedded market, to say how long its bars are; what they hold does not matter."""


def market_of_agent(agent: DistributionalPPO) -> dict[str, Any] | None:
    """Of the environment that an agent has, where that trades bars; how its features were made is not known."""
    env = agent.get_env()
    base = None if env is None else env.unwrapped
    return market_of(base) if isinstance(base, TradingVecEnv) else None


def market_of_run(experiment: Experiment, folder: RunFolder) -> dict[str, Any] | None:
    """Of a run on bars: with its scaler and, on bars of the user's own, how stamps were read."""
    task = experiment.task
    if isinstance(task, PresetTask):
        env = oracle_env(task.preset.market, n_bars=N_BARS, config=task.preset.env_config)
        return market_of(env)
    if not isinstance(task, DataTask):
        return None
    require_bars_of_training(folder, experiment)
    data, config = task.dataset, task.config
    scaler = remembered(folder.path)[1]
    train = data.split.train
    return market_of(
        data.exam_env(),
        look_backs={item.name: item.look_back for item in FeatureSet(config.features).features},
        scaler={**scaler.state_dict(), "clip": config.feature_clip, "min_std": scaler.min_std},
        stamps={"stamp": config.stamp, "tz": config.tz},
        warm_up=config.warm_up,
        trained_on=[f"{stamp}Z" for stamp in data.bars.ts[[train.start, train.stop - 1]]],
    )


def market_of(env: TradingVecEnv, look_backs: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """Of a trading environment.

    observation: names of the numbers of an observation, in their order
    look_backs:  bars before the newest one that a feature reads, by its name, where that is known
    """
    known = look_backs or {}
    return {
        "observation": env.layout.names,
        "symbols": list(env.bars.symbols),
        "interval_seconds": float(env.bars.step / np.timedelta64(1, "s")),
        "bars_per_year": env.bars.bars_per_year,
        "features": [{"name": name, "look_back": known.get(name)} for name in env.feature_names],
        "look_back": env.look_back,
        "account_features": list(env.config.agent_state),
        "account": env.config.account.model_dump(mode="json"),
        "costs": env.config.costs.model_dump(mode="json"),
        **more,
    }
