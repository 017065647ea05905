"""Examining a run: its agent on bars it has not learned from, down to the files of an assessment and the report.

assessment = examine(folder)                       # test of the run's own data, or a fresh draw of its market
assessment = examine(folder, files=["new.csv"])    # bars of another file, seen with the scaler of the training
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailguard.checkpoint import write_file
from tailguard.config_edits import as_trained, trained_experiment
from tailguard.env import TradingVecEnv
from tailguard.env.dataset import DataConfig, Dataset, Part, read_bars
from tailguard.env.oracle import oracle_config
from tailguard.env.replay import Policy
from tailguard.errors import ConfigError, DataError
from tailguard.evaluation import assessment as assessments
from tailguard.evaluation import ledger
from tailguard.evaluation.assessment import Assessment, OptimumFound, Subject, assess, trial_of, verdict_on
from tailguard.evaluation.backtest import Backtest, backtest, backtest_periods, weights_frame
from tailguard.evaluation.comparison import PartResult, compare
from tailguard.evaluation.report import write_report
from tailguard.evaluation.training_record import RiskPromise, TrainingRecord
from tailguard.experiment import DataTask, Experiment, ExperimentConfig, PresetTask, saved_experiment
from tailguard.files import Fields, read_json
from tailguard.market import Bars
from tailguard.market.features import FeatureScaler, FeatureSet
from tailguard.market.splits import picture
from tailguard.ppo import DistributionalPPO
from tailguard.presets import preset
from tailguard.run import RunFolder, newest_checkpoint

Array = npt.NDArray[np.float64]

EXAM_BARS = 10_000
"""Length of the fresh draw on which an agent of an embedded market is examined."""
EXAM_SEED = 1_000_000
"""Added to the seed of the run, so that no training draw is an exam."""
SCALER_FILE = "scaler.json"
LARGEST_SCALER = 2**26
NEW_BARS = "new-bars"
"""The split that bars of other files than those of the training are."""
WALK_FORWARD = "walk-forward"
"""The split that the tests of all folds of a walk-forward are."""
MAIN_SPLITS = ("test", WALK_FORWARD)
"""Whose report is `report.html`; every other evaluation has a report of its own beside it."""
MOST_COMPARED_TRIALS = 49
MOST_COMPARED_BARS = 20_000
"""Of train and validation, beside the bars that are judged."""
LEARNED_SAMPLE = 128
"""Bars of train by which they are known again in other files: so many spread over it, and so many at its end."""
PERIODIC = ("time_left", "period_return")


@dataclass(frozen=True)
class Exam:
    """Bars to be examined on, and everything about them that the report says."""

    env: TradingVecEnv
    start: int
    stop: int
    warm_up: int
    source: str
    data: str
    split: str
    features: Callable[[Bars], npt.NDArray[Any]]
    facts: tuple[tuple[str, str], ...] = ()
    period: int | None = None
    """Bars of an episode, for agents that see how much of it is left."""
    best_policy: Policy | None = None
    best_expected: float = 0.0

    def run(self, policy: Policy, *, with_quantiles: bool = False) -> Backtest:
        """Decide from start to stop; an agent that counts the time of its episodes goes from one to the next."""
        if self.period is not None:
            return backtest_periods(self.env, policy, self.start, self.stop, self.period)
        return backtest(self.env, policy, self.start, self.stop, warm_up=self.warm_up, with_quantiles=with_quantiles)


def preset_exam(task: PresetTask, seed: int) -> Exam:
    """A draw of the market that no training sees."""
    market = task.preset.market
    config = task.preset.env_config
    bars = market.bars(EXAM_BARS, EXAM_SEED + seed)
    env = TradingVecEnv(bars, market.features(bars), market.feature_names, look_back=market.look_back, config=config)
    constants = market.model_dump_json()
    period = period_of(config.agent_state, config.episode_length)
    return Exam(
        env=env,
        start=market.look_back + 64,
        stop=EXAM_BARS - 2,
        warm_up=64,
        source=f"embedded market {task.name!r}",
        data=f"embedded:{task.name}:{digest_of(constants)}",
        split="test",
        features=market.features,
        facts=(
            ("Market", constants),
            ("Draw", f"{EXAM_BARS:,} bars from seed {EXAM_SEED + seed}; training used {seed}"),
        ),
        period=period,
        best_policy=None if period else market.policy(),
        best_expected=market.optimum.reward_per_step,
    )


def data_exam(data: Dataset, part: Part, source: str) -> Exam:
    """A part of a user's own bars."""
    segment = data.segment(part)
    scaled = FeatureSet(data.config.features)
    facts = [
        ("Bars", repr(data.bars)),
        ("Taken from the files", "; ".join(data.bars.notes) or "nothing to say"),
        ("Features", f"{', '.join(data.config.features)}; they look back {data.look_back} bars"),
        ("Warm-up of the memory", f"{segment.start - segment.warm_start} bars without trading"),
    ]
    if len(data.split.train):
        rows = data.split.train
        facts.append(("Scaler", f"fitted on bars {rows.start:,} to {rows.stop - 1:,}, which are train"))
        facts.append(("Splits (t train, v validation, T test, w unused)", picture(data.split, 60)))
    else:
        facts.append(("Scaler", "that of the training"))
    return Exam(
        env=data.exam_env(),
        start=segment.start,
        stop=segment.stop,
        warm_up=segment.start - segment.warm_start,
        source=source,
        data=data.bars.digest(),
        split=part,
        features=lambda bars: data.scaler(scaled(bars)),
        facts=tuple(facts),
        period=period_of(data.config.agent_state, data.config.episode_length),
    )


def period_of(agent_state: Sequence[str], episode_length: int | None) -> int | None:
    """The length of an episode where the agent sees its own place in it."""
    return episode_length if any(state in agent_state for state in PERIODIC) else None


def exam_of(
    experiment: Experiment,
    folder: Path,
    part: Part = "test",
    files: Sequence[str] = (),
    reading: Mapping[str, Any] | None = None,
) -> Exam:
    """What a run is examined on. reading: how other files are to be read where that is not how the run's own were."""
    task = experiment.task
    if isinstance(task, PresetTask) and not files:
        if part != "test":
            raise ConfigError(f"An embedded market has no {part} part: every exam is a fresh draw. Leave out --split.")
        return preset_exam(task, experiment.config.seed)
    if not isinstance(task, DataTask):
        raise ConfigError(
            "Only agents trained on bars can be examined on bars: this run trained on "
            f"{task.name!r}. Train with --data FILE, or on a preset and leave out --data."
        )
    if files and part != "test":
        raise ConfigError(f"--split {part} and --data are both given: all bars of other files are test. Leave one out.")
    if files:
        named = ", ".join(Path(file).name for file in files)
        data = unseen(task.config.replace(**(reading or {})), files, folder)
        exam = replace(data_exam(data, "test", named), split=NEW_BARS)
        return after_training(exam, first_unseen(folder, data.bars))
    return data_exam(task.dataset, part, ", ".join(Path(file).name for file in task.config.files))


def unseen(config: DataConfig, files: Sequence[str], folder: Path) -> Dataset:
    """Bars of other files, in the order of symbols that the agent knows, with the scaler of its training."""
    known, scaler = remembered(folder)
    bars = read_bars(config.replace(files=tuple(files)))
    if set(bars.symbols) != set(known) and len(known) > 1:
        raise DataError(
            f"The agent was trained on {list(known)[:10]}, the files hold {list(bars.symbols)[:10]}. An agent of "
            f"several symbols needs the same ones."
        )
    if len(bars.symbols) != len(known):
        raise DataError(f"The agent trades {len(known)} symbol, the files hold {len(bars.symbols)}. Pick one of them.")
    return Dataset.unseen(config, reordered(bars, known) if len(known) > 1 else bars, scaler)


def after_training(exam: Exam, first: int) -> Exam:
    """Without the decisions on bars before `first`, which the agent learned from."""
    if first <= exam.start:
        return exam
    if exam.stop - first < 2:
        raise DataError(
            f"The agent has learned from the bars of {exam.source}: none is later than its training. Give bars that "
            "came later; `--split train` shows what it earns on those it learned from."
        )
    left_out = f"{first - exam.start:,} bars up to {exam.env.bars.ts[first - 1]} UTC are left out"
    return replace(exam, start=first, facts=(*exam.facts, ("Bars that the agent learned from", left_out)))


def first_unseen(folder: Path, bars: Bars) -> int:
    """Row of the first bar after the training; 0 where the bars are none of those that the agent learned from."""
    said = json.loads((folder / SCALER_FILE).read_text(encoding="utf-8")).get("learned_from")
    if said is None:
        return 0
    ts = np.array(said["ts"], dtype="datetime64[ms]")
    rows = np.minimum(np.searchsorted(bars.ts, ts), len(bars) - 1)
    common = bars.ts[rows] == ts
    close = np.array(said["close"], dtype=np.float64)[common]
    same = np.isclose(bars.close[rows[common]], close, rtol=1e-6, atol=0.0, equal_nan=True)
    if not same.any() or same.mean() < 0.5:
        return 0  # another market, or another time
    return int(np.searchsorted(bars.ts, ts[-1], side="right"))


def reordered(bars: Bars, symbols: Sequence[str]) -> Bars:
    """The same bars with their columns in another order."""
    order = [bars.symbols.index(symbol) for symbol in symbols]
    panel = (bars.open, bars.high, bars.low, bars.close, bars.volume, bars.tradable)
    return Bars.from_arrays(bars.ts, symbols, *(values[:, order] for values in panel), step=bars.step)


def remember(task: object, folder: Path) -> None:
    """What new bars will need: the symbols and the scaler of the training, and a sample of what was learned from."""
    if isinstance(task, DataTask):
        bars, train = task.bars, task.dataset.segment("train")
        last = min(train.stop, len(bars) - 1)  # the close that ends the last step
        spread = np.linspace(train.start, last, LEARNED_SAMPLE).astype(np.int64)
        rows = np.unique([*spread, *range(max(train.start, last - LEARNED_SAMPLE), last + 1)])
        learned_from = {"ts": bars.ts[rows].astype(np.int64).tolist(), "close": finite_rows(bars.close[rows])}
        said = {
            "symbols": list(bars.symbols),
            "scaler": task.dataset.scaler.state_dict(),
            "learned_from": learned_from,
        }
        write_file(folder / SCALER_FILE, json.dumps(said, indent=1).encode())


def finite_rows(values: Array) -> list[list[float | None]]:
    """Rows for JSON, which has no NaN."""
    return [[value if np.isfinite(value) else None for value in row] for row in values.tolist()]


def remembered(folder: Path) -> tuple[tuple[str, ...], FeatureScaler]:
    path = folder / SCALER_FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing, so new bars cannot be scaled as in training. Train the run again.")
    said = Fields(read_json(path, ConfigError, LARGEST_SCALER), str(path), ConfigError)
    scaler, symbols = FeatureScaler(), said.values.get("symbols")
    if not isinstance(symbols, list) or not symbols or not all(isinstance(name, str) for name in symbols):
        raise said.wrong("symbols", "a list of names")
    try:
        scaler.load_state_dict(said.mapping("scaler"))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: scaler is damaged: {error} Restore it from a copy, or train the run again."
        ) from None
    return tuple(symbols), scaler


def examine(
    folder: RunFolder, part: Part = "test", files: Sequence[str] = (), reading: Mapping[str, Any] | None = None
) -> Assessment:
    """Backtest the newest agent of a run, enter the trial, write the assessment's files and the report.

    files:   bars that the agent has never seen, in place of the run's own
    reading: settings of `DataConfig` that say how to read them; by default as the run's own were read
    """
    folder.require_single_agent()
    checkpoint = newest_checkpoint(folder)
    experiment = trained_experiment(folder, checkpoint)
    if not files:
        require_bars_of_training(folder, experiment)
    exam = exam_of(experiment, folder.path, part, files, reading)
    agent = DistributionalPPO.load(checkpoint)
    strategy = exam.run(agent, with_quantiles=True)
    subject = Subject(
        run=folder.name,
        source=exam.source,
        data=exam.data,
        split=exam.split,
        seed=experiment.config.seed,
        step=agent.num_timesteps,
        config=settings_digest(experiment.config),
        gamma=experiment.config.ppo.gamma,
        facts=exam.facts,
    )
    more: dict[str, Any] = {}
    if isinstance(experiment.task, DataTask) and not files:
        more["comparison"], ridge = beside_training(experiment.task.dataset, agent, part, strategy)
        subject = replace(subject, facts=(*subject.facts, ("Ridge regression", f"chosen on validation: {ridge}")))
    return conclude(folder, exam, strategy, subject, np.asarray(agent.config.critic.levels), **more)


def beside_training(data: Dataset, agent: Policy, part: Part, strategy: Backtest) -> tuple[tuple[PartResult, ...], str]:
    """The agent and simple rules on train and validation, and on `part`, whose backtest is there already.

    Test is run only where it is asked for. Of train the last 20,000 bars are enough, and a part is left out where an
    agent that counts the time of its episodes has no whole episode in it.
    """
    found: dict[str, Backtest] = {}
    for name in ("train", "validation", part):
        segment = getattr(data.split, name)
        if name == part or segment is None or not len(segment):
            continue
        exam = data_exam(data, name, "")
        exam = replace(exam, start=max(exam.start, exam.stop - MOST_COMPARED_BARS))
        if exam.period is None or exam.stop - exam.start >= exam.period:
            found[name] = exam.run(agent)
    order: tuple[Part, ...] = ("train", "validation", "test")
    found[part] = strategy
    return compare(data, {name: found[name] for name in order if name in found})


def require_bars_of_training(folder: RunFolder, experiment: Experiment) -> None:
    """Refuse files that hold other bars than those the run was begun with: splits and scaler would be others too."""
    begun = folder.manifest().get("data", {}).get("bars")
    if isinstance(experiment.task, DataTask) and begun not in (None, experiment.task.bars.digest()):
        named = " ".join(f"--data {file}" for file in experiment.task.config.files)
        raise DataError(
            f"The bars of {', '.join(experiment.task.config.files)} are not those that {folder.path} was begun with, "
            "so what is train and test in them, and how features are scaled, would be something else. Restore the "
            f"files, or evaluate them as new bars: `tailguard evaluate {folder.handle} {named}`."
        )


def conclude(
    folder: RunFolder,
    exam: Exam,
    strategy: Backtest,
    subject: Subject,
    levels: Array | None = None,
    **more: Any,
) -> Assessment:
    """Enter the trial into the ledger, assess, write the files and the report."""
    ledger.record(folder.path, trial_of(subject, strategy))
    trials = ledger.gather(folder.path.parent, subject.data, subject.split)
    found = assess(
        exam.env.bars,
        strategy,
        subject,
        ledger.count(trials),
        costs=exam.env.config.costs,
        account=exam.env.config.account,
        levels=levels,
        features=exam.features,
        **{"other_trials": returns_of_others(folder, trials, strategy), **more},
    )
    result = replace(found, optimum=optimum_of(exam, strategy))
    name = evaluation_name(subject.split, subject.data)
    assessments.save(result, evaluation_folder(folder), name)
    write_report(result, training_record(folder), report_file(folder, name))
    return result


def optimum_of(exam: Exam, strategy: Backtest) -> OptimumFound | None:
    """What the best policy earns on the same bars, where it is known."""
    if exam.best_policy is None:
        return None
    best = exam.run(exam.best_policy)
    return OptimumFound.compare(np.log1p(strategy.returns), np.log1p(best.returns), exam.best_expected)


def returns_of_others(folder: RunFolder, trials: Sequence[ledger.Trial], strategy: Backtest) -> Array | None:
    """(T, K) returns of other runs on exactly these bars, as far as their files are there."""
    found: list[Array] = []
    for run in sorted({trial.run for trial in trials} - {folder.name}):
        name = evaluation_name(trials[0].split, trials[0].data)
        path = evaluation_folder(RunFolder(folder.path.parent / run)) / f"{name}.parquet"
        if path.is_file() and len(found) < MOST_COMPARED_TRIALS:
            try:
                bars, returns = assessments.returns_by_bar(path)
            except assessments.UNREADABLE as error:
                raise DataError(
                    f"{path} is damaged: {str(error).splitlines()[0]}. Make it anew with `tailguard evaluate {run}`."
                ) from None
            if np.array_equal(bars, strategy.fill_at):
                found.append(returns)
    return np.column_stack(found) if found else None


def examined(folder: RunFolder, name: str = "test") -> Assessment:
    """An assessment that is there already, with the trials as they are counted now. Looks at nothing anew."""
    folder.require()
    kept = assessments.load(evaluation_folder(folder), name)
    trials = ledger.gather(folder.path.parent, kept.subject.data, kept.subject.split)
    may_lose = kept.verdict.unseen_loss or None  # earlier versions kept none
    verdict = verdict_on(kept.subject, kept.strategy, kept.hold, ledger.count(trials), may_lose, kept.comparison)
    return replace(kept, verdict=verdict)


def rewrite_report(folder: RunFolder, name: str = "test") -> Path:
    """The report of an assessment that is there already."""
    return write_report(examined(folder, name), training_record(folder), report_file(folder, name))


def write_weights(assessment: Assessment, path: Path) -> None:
    """What the account was asked to hold (`evaluation.backtest.weights_frame`): parquet or CSV, by the file's name."""
    require_weights_file(path)
    frame = weights_frame(assessment.strategy)
    if path.suffix == ".csv":
        frame.write_csv(path, datetime_format="%Y-%m-%dT%H:%M:%S%.3f%:z")
    else:
        frame.write_parquet(path)


def require_weights_file(path: Path) -> None:
    """Refuse a file that could not be written, before anything is examined."""
    if path.suffix not in (".parquet", ".pq", ".csv"):
        raise ConfigError(f"--weights {path}: write to a .parquet or a .csv file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--weights {path}: there is no folder {path.parent}. Make it first.")


def evaluation_folder(folder: RunFolder) -> Path:
    return folder.path / "evaluation"


def evaluation_name(split: str, data: str) -> str:
    """The name of an evaluation's files; other bars (`data` is their digest) have a name of their own each."""
    return f"{split}-{data[:8]}" if split == NEW_BARS else split


def report_file(folder: RunFolder, name: str = "test") -> Path:
    """Where the report of an evaluation is: none overwrites that of another."""
    return folder.path / ("report.html" if name in MAIN_SPLITS else f"report-{name}.html")


def training_record(folder: RunFolder) -> TrainingRecord:
    """What training left behind; of a walk-forward the curves of its longest training and the alerts of all."""
    config = saved_experiment(folder.config_file)
    promise = promise_of(as_trained(folder, config, folder.last_checkpoint())[0] if folder.steps() else config)
    every = [TrainingRecord.read(place, promise) for place in (folder.path, *sorted(folder.path.glob("folds/*")))]
    longest = max(every, key=lambda record: len(record.rows))
    return replace(longest, alerts=tuple(alert for record in every for alert in record.alerts))


def promise_of(config: ExperimentConfig) -> RiskPromise | None:
    """The CVaR limit that training was given, if any."""
    risk = config.ppo.risk
    if risk.cvar_limit is None:
        return None
    if config.data is not None:
        episode: int | None = config.data.episode_length
    else:
        episode = oracle_config(preset(config.preset).market).episode_length if config.preset is not None else None
    period = risk.horizon or episode
    return RiskPromise(risk.cvar_limit, risk.alpha, period) if period is not None else None


def settings_digest(config: ExperimentConfig) -> str:
    """Equal for two runs that differ in nothing but their seed."""
    return digest_of(json.dumps({**config.model_dump(mode="json"), "seed": None}, sort_keys=True))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
