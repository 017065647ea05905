"""A user's own bars as environments: features, chronological splits, a scaler fitted on train, default costs.

    data = Dataset.load(DataConfig(files=("bars.csv",), tz="UTC"))
    env = data.training_env(n_envs=16, seed=0)      # episodes inside train
    exam = data.exam_env()                          # all bars, for backtests of data.split.test

What is not set is chosen from the data by `data_defaults`, which also says why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tailguard.configuration import Config, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval
from tailguard.env.accounting import AccountRules
from tailguard.env.costs import Costs
from tailguard.env.observation import AgentState
from tailguard.env.vec_env import EnvConfig, TradingVecEnv
from tailguard.errors import ConfigError, DataError
from tailguard.files import open_regular
from tailguard.market import Bars, load_bars
from tailguard.market.check import DataReport, check_file
from tailguard.market.features import DEFAULT_FEATURES, FeatureScaler, FeatureSet
from tailguard.market.layout import columns_of
from tailguard.market.sources import MENDED
from tailguard.market.splits import Segment, Split, SplitRules, chronological

Part = Literal["train", "validation", "test"]

USUAL_EPISODE = 250
FEW_BARS = 2_000


class DataConfig(Config):
    """Where the bars come from, what the agent sees of them, how they are split and what trading costs."""

    files: tuple[Annotated[str, Field(pattern=r"^[^\x00]+$")], ...] = ()
    """CSV, parquet or feather files; several are joined on one clock."""
    symbol: str | None = None
    """Only this symbol of files that hold many."""
    tz: str | None = None
    """Zone of stamps that do not name one."""
    stamp: Literal["open", "close"] = "open"
    """Whether a bar is stamped at its open or its close."""
    repair: tuple[str, ...] = ()
    """Named repairs of `load_bars`."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a file without header, or pairs such as `close=last` where a name is not guessed."""
    ambiguous: Literal["raise", "earliest", "latest"] = "raise"
    """Which of two equal wall-clock times is meant where clocks go back."""
    features: tuple[str, ...] = DEFAULT_FEATURES
    """What the agent sees of each symbol, by name."""
    feature_clip: PositiveFloat = 5.0
    """Features are cut at this many standard deviations of train."""
    train: Fraction = 0.6
    """Share of the usable bars that teach."""
    validation: UnitInterval = 0.2
    """Share that may be looked at while choosing settings; 0 for none. The rest is test."""
    warm_up: NonNegativeInt = 64
    """Bars that the policy's memory sees before its first decision of a split."""
    episode_length: PositiveInt = USUAL_EPISODE
    """Steps of a training episode."""
    costs: Costs = Costs()
    account: AccountRules = AccountRules()
    agent_state: tuple[AgentState, ...] = ("weight",)
    """What the agent sees of its account. A path's own history tells nothing about its future, so only the weight."""


@dataclass(frozen=True)
class Dataset:
    """Bars, their scaled features and their split."""

    config: DataConfig
    bars: Bars
    split: Split
    scaler: FeatureScaler
    features: npt.NDArray[np.float32]
    """(T, A, F), scaled; row t is known at the close of bar t."""

    @classmethod
    def load(cls, config: DataConfig) -> Self:
        """Read the files and fit the scaler on train."""
        return cls.of(config, read_bars(config))

    @classmethod
    def of(
        cls, config: DataConfig, bars: Bars, scaler: FeatureScaler | None = None, split: Split | None = None
    ) -> Self:
        """From bars; a `scaler` that was fitted before is used as it is, and so is a `split`."""
        features = FeatureSet(config.features)
        split = split or split_of(config, len(bars))
        values = features(bars)
        if scaler is None:
            scaler = FeatureScaler(clip=config.feature_clip)
            scaler.fit(values, split.train.rows)
        return cls(config, bars, split, scaler, scaler(values))

    @classmethod
    def unseen(cls, config: DataConfig, bars: Bars, scaler: FeatureScaler) -> Self:
        """Other bars than those of the training: all of them are test, after look-back and warm-up."""
        rules = split_rules(config)
        start = rules.look_back + rules.warm_up
        if len(bars) < start + 2 + rules.purge:
            raise DataError(
                f"{len(bars)} bars are too few: features look {rules.look_back} bars back and the memory is warmed on "
                f"{rules.warm_up}, so the first decision is at bar {start}. Give more bars."
            )
        nothing = Segment(0, 0, 0, 0)
        test = Segment(start, len(bars) - rules.purge, rules.look_back, len(bars))
        return cls.of(config, bars, scaler, Split(nothing, None, test))

    @property
    def look_back(self) -> int:
        return FeatureSet(self.config.features).look_back

    def segment(self, part: Part) -> Segment:
        """The bars of a part of the split."""
        found: Segment | None = getattr(self.split, part)
        if found is None or not len(found):
            raise ConfigError(f"This data has no {part} part. Set data.{part} to a share of the bars, or look at test.")
        return found

    def training_env(self, n_envs: int, seed: int) -> TradingVecEnv:
        """Episodes at random places of train; no reward reaches beyond it."""
        return self._episodes("train", n_envs, seed)

    def validation_env(self, n_envs: int, seed: int) -> TradingVecEnv:
        """Episodes at random places of validation, to choose among agents."""
        return self._episodes("validation", n_envs, seed)

    def test_env(self, n_envs: int, seed: int) -> TradingVecEnv:
        """Episodes at random places of test, of which one must fit."""
        length = min(self.config.episode_length, len(self.segment("test")))
        return Dataset.of(self.config.replace(episode_length=length), self.bars, self.scaler, self.split)._episodes(
            "test", n_envs, seed
        )

    def _episodes(self, part: Part, n_envs: int, seed: int) -> TradingVecEnv:
        segment = self.segment(part)
        config = EnvConfig(
            episode_length=self.config.episode_length,
            costs=self.config.costs,
            account=self.config.account,
            agent_state=self.config.agent_state,
        )
        return self._env(config, n_envs=n_envs, seed=seed, window=(segment.start, segment.stop + 1))

    def exam_env(self) -> TradingVecEnv:
        """One environment over all bars, for `tailguard.evaluation.backtest`, which says where to start and stop."""
        return self._env(
            EnvConfig(
                episode_length=None,
                random_start=False,
                costs=self.config.costs,
                account=self.config.account,
                agent_state=self.config.agent_state,
            )
        )

    def _env(self, config: EnvConfig, **options: Any) -> TradingVecEnv:
        return TradingVecEnv(
            self.bars, self.features, self.config.features, look_back=self.look_back, config=config, **options
        )


def read_bars(config: DataConfig) -> Bars:
    """The bars of a configuration, checked."""
    if not config.files:
        raise ConfigError("data.files is empty: name at least one file of bars, for example with --data bars.csv.")
    for file in config.files:
        open_regular(file, DataError).close()
    source: Any = list(config.files) if len(config.files) > 1 else config.files[0]
    try:
        return load_bars(
            source,
            symbol=config.symbol,
            tz=config.tz,
            stamp=config.stamp,
            columns=columns_of(config.columns),
            ambiguous=config.ambiguous,
            repair=config.repair,
        )
    except DataError as error:
        checks = " and ".join(f"`tailguard data check {shlex.quote(file)}`" for file in config.files[:2])
        raise DataError(f"{error}\n{checks} lists everything that is wrong.") from None


def check_bars(config: DataConfig) -> list[DataReport]:
    """The data check of each file, read as the configuration reads it; what its repairs put right is only noted."""
    stamp: Literal["close"] | None = "close" if config.stamp == "close" else None  # None lets it look for closes
    mended = [code for name in config.repair for code in MENDED[name]]
    options: dict[str, Any] = {"columns": columns_of(config.columns), "ambiguous": config.ambiguous, "accept": mended}
    return [check_file(file, stamp=stamp, tz=config.tz, **options) for file in config.files]


def split_rules(config: DataConfig) -> SplitRules:
    """What the splits must keep apart, from the features and the warm-up of the memory."""
    return SplitRules(look_back=FeatureSet(config.features).look_back, warm_up=config.warm_up)


def split_of(config: DataConfig, n_bars: int) -> Split:
    return chronological(n_bars, split_rules(config), train=config.train, validation=config.validation)


@dataclass(frozen=True)
class Default:
    """A setting chosen from the data, and why."""

    setting: str
    value: Any
    reason: str


def data_defaults(bars: Bars, given: Mapping[str, Any]) -> tuple[Default, ...]:
    """What a configuration that says only `given` gets for these bars where the usual default does not fit."""
    chosen: list[Default] = []
    silent = [symbol for symbol, volume in zip(bars.symbols, bars.volume.T, strict=True) if not (volume > 0).any()]
    if silent:
        named = f"{len(silent)} of {len(bars.symbols)} symbols have no volume"
        chosen.append(Default("costs.impact", 0.0, f"{named}, so the impact of orders on prices cannot be modelled"))
    if len(bars) < FEW_BARS:
        chosen.append(Default("validation", 0.0, f"{len(bars)} bars are few, so none are set aside for choosing"))
    known = {key: value for key, value in given.items() if value is not None}
    validation = known.get("validation", 0.0 if len(bars) < FEW_BARS else DataConfig.model_fields["validation"].default)
    plan = DataConfig(**{**known, "validation": validation, "costs": Costs(impact=0.0)})
    n_train = len(split_of(plan, len(bars)).train)
    if n_train < 2 * USUAL_EPISODE:
        chosen.append(Default("episode_length", max(n_train // 2, 1), f"train has {n_train} bars"))
    return tuple(chosen)


def nested_defaults(defaults: Sequence[Default]) -> dict[str, Any]:
    """{"costs": {"impact": 0.0}, ...}, in the form a configuration takes."""
    out: dict[str, Any] = {}
    for default in defaults:
        *path, last = default.setting.split(".")
        place = out
        for name in path:
            place = place.setdefault(name, {})
        place[last] = default.value
    return out
