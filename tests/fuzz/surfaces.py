"""The ways into the package that a file or a name of somebody else can take, and what must hold of what is let in."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from polars.exceptions import PolarsError

from tailguard import DistributionalPPO
from tailguard.checkpoint import DIGEST, MANIFEST, TENSORS, TREE, digest
from tailguard.cli.seeds import parsed_seeds
from tailguard.cli.train import free_path
from tailguard.errors import TailguardError
from tailguard.evaluation import ledger
from tailguard.evaluation.attack_record import AttackRecord, Curve, Point, read_record
from tailguard.evaluation.ledger import Trial
from tailguard.evaluation.training_record import TrainingRecord
from tailguard.experiment import ExperimentConfig, experiment_config, load_experiment, saved_experiment
from tailguard.market import load_bars
from tailguard.market.check import check_file
from tailguard.population.config import PopulationConfig, load_population
from tailguard.population.history import ancestry, history, latest
from tailguard.population.journal import KINDS, Journal
from tailguard.population.replay import replayed
from tailguard.population.scheduler import PBTConfig, PBTScheduler, Report, RunSegment
from tailguard.population.segment import bundle_name
from tailguard.robustness.bench import write_record
from tailguard.run import RunFolder, run_path
from tailguard.run.records import cut
from tailguard.yaml_files import parse_yaml
from tests.agents import tiny_agent
from tests.fuzz.mutations import SNIPPETS, VALUES, spoiled, spoiled_tree
from tests.fuzz.runner import Outcome, Surface, WrongLoad


def attempt(load: Callable[[], Any], parses: Callable[[], bool], check: Callable[[Any], None] | None = None) -> Outcome:
    """Load, and let `check` look at what was let in; a refusal is late when what was given could be parsed."""
    try:
        loaded = load()
    except TailguardError as error:
        text = str(error)
        if not text.strip():
            raise WrongLoad("a refusal without a word") from error
        return Outcome("refused late" if tried(parses) else "refused early", text)
    if check is not None:
        check(loaded)
    return Outcome("loaded")


def tried(parses: Callable[[], bool]) -> bool:
    try:
        return parses()
    except Exception:
        return False


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongLoad(what)


# bars


def rows(rng: random.Random) -> list[list[str]]:
    """Valid bars as text."""
    n, hour, price = rng.choice([3, 40, 300]), 0, 100.0
    first = datetime(2024, 1, 1, tzinfo=UTC).timestamp() + 3600 * rng.randrange(8000)
    out = []
    for _ in range(n):
        close = price * (1 + rng.uniform(-0.01, 0.01))
        high, low = max(price, close) * 1.001, min(price, close) * 0.999
        stamp = datetime.fromtimestamp(first + 3600 * hour, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        out.append([stamp, *(f"{value:.4f}" for value in (price, high, low, close)), f"{rng.uniform(0, 9):.2f}"])
        hour, price = hour + 1, close
    return out


HEADER = ["ts", "open", "high", "low", "close", "volume"]


def bars_file(rng: random.Random, place: Path) -> tuple[Path, bytes]:
    """A file of bars, mostly spoiled, and its text before it was packed (nothing for tables of columns)."""
    kind, good = rng.choice(["csv"] * 6 + ["gz", "zlib", "zst", "parquet", "feather"]), rows(rng)
    text = b"\n".join(",".join(row).encode() for row in [HEADER, *good]) + b"\n"
    if kind in ("parquet", "feather"):
        return table_file(kind, good, rng, place), b""
    if rng.random() < 0.8:
        text = spoiled(text, rng)
    if rng.random() < 0.1:
        text = text.replace(b",", rng.choice([b";", b"\t", b"|"]))
    data = {"gz": gzip.compress, "zlib": zlib.compress}.get(kind, bytes)(text)
    file = place / f"bars.{'csv' if kind in ('csv', 'zlib') else 'csv.' + kind}"
    if kind == "zst":
        pl.DataFrame({"line": text.decode("utf-8", "replace").split("\n")}).lazy().sink_csv(
            file, include_header=False, compression="zstd", quote_style="never", check_extension=False
        )
        data = file.read_bytes()
    if kind != "csv" and rng.random() < 0.5:
        data = spoiled(data, rng)
    file.write_bytes(data)
    return file, text if kind == "csv" else b""


def table_file(kind: str, good: list[list[str]], rng: random.Random, place: Path) -> Path:
    """Columns of other types, values and names, or bytes that were changed afterwards."""
    columns: dict[str, Any] = {name: [row[i] for row in good] for i, name in enumerate(HEADER)}
    frame = pl.DataFrame(columns).with_columns(
        pl.col(HEADER[1:]).cast(pl.Float64), pl.col("ts").str.to_datetime("%Y-%m-%dT%H:%M:%SZ")
    )
    types = [
        pl.Int8,
        pl.Int64,
        pl.Float32,
        pl.String,
        pl.Boolean,
        pl.Binary,
        pl.Date,
        pl.Datetime("ns", "UTC"),
        pl.Duration,
        pl.Categorical,
        pl.Null,
    ]
    for _ in range(rng.randint(0, 2)):
        name = rng.choice(frame.columns)
        change = rng.randrange(5)
        if change == 0:
            with suppress(PolarsError):  # not every type becomes every other
                frame = frame.with_columns(pl.col(name).cast(rng.choice(types), strict=False))
        elif change == 1:
            frame = frame.with_columns(pl.lit(rng.choice([None, 0, -1.0, 1e308, float("nan"), "x", [1]])).alias(name))
        elif change == 2:
            frame = frame.drop(name) if frame.width > 1 else frame
        elif change == 3:
            with suppress(PolarsError):  # there is one of that name
                frame = frame.rename({name: rng.choice(["", "x", "date", "time", "symbol", "Close"])})
        else:
            frame = frame.with_columns(
                pl.Series(name, [rng.choice([0, 2**62, -(2**62), 2**40])] * frame.height).cast(
                    pl.Datetime(rng.choice(["ms", "us"]), rng.choice([None, "UTC", "America/New_York"]))
                )
            )
    file = place / f"bars.{kind}"
    frame.write_parquet(file) if kind == "parquet" else frame.write_ipc(file)
    if rng.random() < 0.4:
        file.write_bytes(spoiled(file.read_bytes(), rng))
    return file


def reading(rng: random.Random) -> dict[str, Any]:
    """Options of a reader."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["tz"] = rng.choice(
            ["UTC", "America/New_York", "Pacific/Apia", "Mars/Olympus", "", "\0", "../../etc/passwd"]
        )
    if rng.random() < 0.2:
        options["stamp"] = rng.choice(["open", "close", "middle"])
    if rng.random() < 0.15:
        options["columns"] = rng.choice(
            [HEADER, HEADER[:3], [*HEADER, "x"], ["ts"] * 6, {"ts": "ts"}, {"ts": "nope"}, {"x": "y"}, []]
        )
    return options


def parses_as_table(file: Path) -> bool:
    if file.suffix == ".parquet":
        return pl.read_parquet(file).height > 0
    if file.suffix == ".feather":
        return pl.read_ipc(file, memory_map=False).height > 0
    return pl.read_csv(file, infer_schema=False).height > 0


def case_load_bars(rng: random.Random, place: Path) -> Outcome:
    file, text = bars_file(rng, place)
    options = reading(rng)
    repair = (
        rng.sample(["sort", "duplicates", "missing", "swapped_volume", "nothing"], rng.randint(0, 2))
        if rng.random() < 0.3
        else []
    )

    def check(bars: Any) -> None:
        shape = bars.close.shape
        require(bool(np.all(np.diff(bars.ts.astype(np.int64)) > 0)), "stamps that do not rise")
        traded = bars.tradable
        values = [part[traded] for part in (bars.open, bars.high, bars.low, bars.close)]
        require(all(bool(np.isfinite(part).all() and (part > 0).all()) for part in values), "prices that are none")
        require(bool((bars.high[traded] >= bars.low[traded]).all()), "high below low")
        expected = independently_read(text) if not options and not repair else None
        if expected is not None and shape[1] == 1:
            found = dict(zip(bars.ts.astype(np.int64).tolist(), bars.close[:, 0].tolist(), strict=True))
            require(found == expected, f"closes other than written: {set(found.items()) ^ set(expected.items())}")

    return attempt(lambda: load_bars(file, repair=repair, **options), lambda: parses_as_table(file), check)


def independently_read(text: bytes) -> dict[int, float] | None:
    """{milliseconds: close} by Python's own csv module; None for what is not plainly a table of such bars."""
    try:
        lines = list(csv.reader(io.StringIO(text.decode("ascii"), newline=""), strict=True))
        if lines[0] != HEADER or any(len(line) != len(HEADER) for line in lines if line):
            return None
        kept = [line for line in lines[1:] if line]
        found = {}
        for line in kept:
            at = datetime.strptime(line[0], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            found[int(at.timestamp() * 1000)] = float(line[4])
        return found if len(found) == len(kept) else None
    except (ValueError, IndexError, csv.Error):
        return None


def case_data_check(rng: random.Random, place: Path) -> Outcome:
    file, _ = bars_file(rng, place)
    options = reading(rng)
    if options.get("stamp") == "middle":
        del options["stamp"]

    def check(report: Any) -> None:
        from tailguard.market.check import render

        require(bool(render(report)), "an empty report")
        if report.codes("error"):
            raise Refused(", ".join(report.codes("error")))

    try:
        return attempt(lambda: check_file(file, **options), lambda: parses_as_table(file), check)
    except Refused as error:
        return Outcome("refused late" if tried(lambda: parses_as_table(file)) else "refused early", str(error))


class Refused(Exception):  # noqa: N818 (the report of a check that has found errors)
    """A report with errors."""


# configurations

EXPERIMENT: dict[str, Any] = {"preset": "regime", "n_envs": 4, "steps": 4096, "seed": 1}
PATHS = (
    "ppo.gamma",
    "n_envs",
    "ppo.critic.n_quantiles",
    "policy_kwargs.net_arch",
    "data.files",
    "ppo",
    "gym_env",
    "a.b.c",
    "",
)


@cache
def experiment_tree() -> dict[str, Any]:
    return experiment_config(EXPERIMENT).model_dump(mode="json")


def yaml_file(tree: Mapping[str, Any], rng: random.Random, place: Path) -> Path:
    """A configuration changed as a tree, as text, or both."""
    changed: Any = tree
    as_tree = rng.random() < 0.7
    if as_tree:
        for _ in range(rng.randint(1, 2)):
            changed = spoiled_tree(changed, rng)
    try:
        data = yaml.safe_dump(changed, sort_keys=False, allow_unicode=False).encode()
    except (yaml.YAMLError, UnicodeEncodeError, ValueError):
        data = repr(changed).encode("utf-8", "surrogatepass")
    file = place / "config.yaml"
    file.write_bytes(data if as_tree and rng.random() < 0.8 else spoiled(data, rng))
    return file


def parses_as_yaml(file: Path) -> bool:
    return isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def case_experiment(rng: random.Random, place: Path) -> Outcome:
    tree = dict(experiment_tree())
    if rng.random() < 0.3:
        tree = (
            {"data": {"files": ["bars.csv"], "tz": "UTC"}, "ppo": tree["ppo"]}
            if rng.random() < 0.5
            else dict(EXPERIMENT)
        )
    file = yaml_file(tree, rng, place)
    overrides = []
    if rng.random() < 0.3:
        value = rng.choice(SNIPPETS).decode("utf-8", "replace")
        overrides = [f"{rng.choice(PATHS)}={value}"]
    load = (
        saved_experiment
        if rng.random() < 0.2 and not overrides
        else lambda path: load_experiment(path, None, overrides)
    )

    def check(config: ExperimentConfig) -> None:
        again = experiment_config(parse_yaml(config.to_yaml(), "again")) if config.data is None else config
        require(again == config, "a configuration that is not read back as it was written")

    return attempt(lambda: load(file), lambda: parses_as_yaml(file), check)


def case_population_config(rng: random.Random, place: Path) -> Outcome:
    space = [
        {"name": "learning_rate", "low": 1e-4, "high": 1e-2, "log": True},
        {"name": "n_epochs", "values": [1, 2, 4]},
    ]
    tree = {**experiment_tree(), "population": {"hyperparams": space, "population_size": 4}}
    file = yaml_file(tree, rng, place)

    def check(config: PopulationConfig) -> None:
        file.write_text(config.to_yaml(), encoding="utf-8")
        require(load_population(file) == config, "a population that is not read back as it was written")
        if config.population.population_size <= 100:
            config.scheduler().start()

    return attempt(lambda: load_population(file), lambda: parses_as_yaml(file), check)


# journals and records

SPACE = PBTConfig(
    population_size=3,
    hyperparams=(
        {"name": "learning_rate", "low": 1e-4, "high": 1e-2, "log": True},
        {"name": "n_epochs", "low": 1, "high": 8, "integer": True},
    ),
)
ROUNDS = 4


@cache
def good_journal() -> bytes:
    """Three members, four rounds, made as the driver makes it."""
    place, rng = Path("journal-made-once"), random.Random(0)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    journal, scheduler = Journal(place / "population.jsonl"), PBTScheduler(SPACE, ROUNDS)
    journal.append("start", time=1.0)
    waiting = [command for command in scheduler.start() if isinstance(command, RunSegment)]
    while waiting:
        segment = waiting.pop(0)
        score = rng.uniform(-1, 1)
        report = Report(segment.member, segment.round, score, bundle_name(segment.member, segment.round), {"ev": 0.5})
        about = {"hyperparameters": dict(segment.hyperparameters), "source": segment.source, "parent": None}
        told = {"step": 128, "cpu_seconds": 0.1, "train_cpu_seconds": 0.1, "metrics": {"train/kl": 0.01, "x": None}}
        journal.append(report, time=1.0, seconds=0.5, **about, **told)
        waiting += [command for command in scheduler.handle(report) if isinstance(command, RunSegment)]
    return journal.path.read_bytes()


def decisive(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What of a journal decides how a population goes on, but for scores, which nobody else knows any more."""
    names = ("event", "member", "round", "attempt", "bundle")
    return [tuple(line.get(name) for name in names) for line in lines if line["event"] in KINDS]


def case_journal(rng: random.Random, place: Path) -> Outcome:
    good = good_journal()
    data = spoiled_lines(good, rng) if rng.random() < 0.6 else spoiled(good, rng)
    file = place / "population.jsonl"
    file.write_bytes(data)

    def load() -> list[dict[str, Any]]:
        lines = Journal(file).read()
        finished = history(lines)
        latest(finished)
        ancestry(finished, 0)
        replayed(PBTScheduler(SPACE, ROUNDS), lines, file)
        return lines

    def check(lines: list[dict[str, Any]]) -> None:
        whole = decisive([json.loads(line) for line in good.splitlines()])
        found = decisive(lines)
        require(found == whole[: len(found)], "another history than what happened")

    return attempt(load, lambda: parses_as_lines(data), check)


def spoiled_lines(data: bytes, rng: random.Random) -> bytes:
    """One line with another value, as somebody with an editor leaves it."""
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(spoiled_tree(json.loads(lines[at]), rng)).encode()
    return b"\n".join(lines) + b"\n"


def parses_as_lines(data: bytes) -> bool:
    return all(isinstance(json.loads(line), dict) for line in data.splitlines() if line.strip())


def case_records(rng: random.Random, place: Path) -> Outcome:
    """Metrics, alerts, trials and the record of attacks."""
    kind = rng.choice(["metrics.jsonl", "alerts.jsonl", ledger.FILE, "attack.json"])
    for name in ("metrics.jsonl", "alerts.jsonl", ledger.FILE, "attack.json"):
        (place / name).unlink(missing_ok=True)
    file = place / kind
    row = {"step": 128, "update": 1, "time": 1.0, "train/kl": 0.01, "alert": "warn/x", "meaning": "m"}
    trial = asdict(Trial("bars", "test", "run", 0, None, "settings", 1_000, 500, 0.1, "abc", "2024"))
    if kind == "attack.json":
        points = tuple(Point(size, 1.0, 0.5, 0.0, (1.0, 2.0)) for size in (0.0, 0.1))
        write_record(AttackRecord(0.05, 2, 4, (Curve("mad", "", "words", points),)), file)
        good = json.dumps(json.loads(file.read_bytes())).encode() + b"\n"
    else:
        made = row if kind != ledger.FILE else trial
        good = b"".join(json.dumps({**made, "step": 128 * i}).encode() + b"\n" for i in range(1, 6))
    data = spoiled_lines(good, rng) if rng.random() < 0.6 else spoiled(good, rng)
    file.write_bytes(data)

    def load() -> Any:
        if kind == ledger.FILE:
            return ledger.read(place)
        if kind == "attack.json":
            found = read_record(place)
            require(found is not None and bool(found.strongest), "no record")
            return found
        record = TrainingRecord.read(place)
        record.series("train/kl")
        return cut(file, 2**63)

    def check(found: Any) -> None:
        if kind == "attack.json":
            require(
                all(isfinite(p.mean_return) or p.mean_return != p.mean_return for c in found.curves for p in c.points),
                "no numbers",
            )
            return
        whole = data if kind == ledger.FILE else data[: data.rfind(b"\n") + 1]
        n_lines = sum(bool(line.strip()) for line in whole.split(b"\n"))
        require(len(found) == n_lines, f"{len(found)} rows of {n_lines}")

    return attempt(load, lambda: parses_as_lines(data), check)


# bundles


@cache
def good_bundles() -> list[Path]:
    """Small agents of several kinds, saved once; some as checkpoints that know where training stands."""
    agents = [
        tiny_agent(policy="MlpPolicy", policy_kwargs={"net_arch": [4]}, n_steps=8, batch_size=16),
        tiny_agent(
            policy_kwargs={"lstm_hidden_size": 4, "memory": "gru"},
            n_steps=8,
            batch_size=16,
            critic={"kind": "categorical", "n_atoms": 11, "n_quantiles": 32},
        ),
    ]
    places = []
    for number, agent in enumerate(agents):
        places.append(Path(f"agent-{number}").resolve())
        agent.save(places[-1])
    return places


def case_bundle(rng: random.Random, place: Path) -> Outcome:
    source, target = rng.choice(good_bundles()), place / "agent"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    raw = rng.random() < 0.25
    name = rng.choice([TREE, TENSORS, MANIFEST, DIGEST] if raw else [TREE, TENSORS, MANIFEST, MANIFEST])
    file = target / name
    before = file.read_bytes()
    if name in (TREE, MANIFEST) and not raw and rng.random() < 0.8:
        file.write_bytes(json.dumps(spoiled_tree(json.loads(before), rng)).encode())
    elif name == TENSORS and not raw:
        file.write_bytes(spoiled_tensors(before, rng))
    else:
        file.write_bytes(spoiled(before, rng))
    if not raw:
        sign(target)

    def check(agent: DistributionalPPO) -> None:
        require(not raw or file.read_bytes().strip() == before.strip(), "damaged bytes")
        require(
            all(bool(part.isfinite().all()) for part in agent.policy.state_dict().values()),
            "weights that are not finite",
        )
        shape = agent.observation_space.shape or ()
        action, _ = agent.predict(np.zeros((1, *shape), np.float32))
        require(bool(np.isfinite(action).all()), "an action that is not finite")

    return attempt(lambda: DistributionalPPO.load(target), lambda: not raw, check)


def spoiled_tensors(data: bytes, rng: random.Random) -> bytes:
    """Another header or other numbers in a file of tensors."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    kind = rng.randrange(3)
    if kind == 0:
        header = json.dumps(spoiled_tree(json.loads(header), rng)).encode()
        return len(header).to_bytes(8, "little") + header + body
    if kind == 1:
        at = rng.randrange(max(len(body) - 4, 1))
        number = np.float32(rng.choice([np.nan, np.inf, -1.0, 1e38, 0.5])).tobytes()
        return data[: 8 + size] + body[:at] + number + body[at + 4 :]
    return spoiled(data, rng)


def sign(target: Path) -> None:
    """New checksums, as somebody who wants a changed bundle to be read would write them."""
    manifest = (
        json.loads((target / MANIFEST).read_bytes())
        if tried(lambda: json.loads((target / MANIFEST).read_bytes()) != 0)
        else None
    )
    if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict):
        for name in (TREE, TENSORS):
            if isinstance(manifest["files"].get(name), dict):
                data = (target / name).read_bytes()
                manifest["files"][name] |= {"bytes": len(data), "sha256": digest(data)}
        (target / MANIFEST).write_text(json.dumps(manifest))
    (target / DIGEST).write_text(digest((target / MANIFEST).read_bytes()))


# names


def case_name(rng: random.Random, place: Path) -> Outcome:
    parts = [
        "a",
        "first",
        "..",
        ".",
        "",
        "/",
        "\0",
        "\n",
        "é",
        "\u202e",
        "\ud800",
        "\U0001f600",
        " ",
        "~",
        "$HOME",
        "*",
        "a" * 100,
        "é" * 60,
        "-",
        "step-3",
        "con",
        "\x7f",
        "lock",
        "%s",
        "{}",
    ]
    name = "".join(rng.choice(parts) for _ in range(rng.randint(1, 4)))
    kind = rng.randrange(3)
    if kind == 1:
        return attempt(
            lambda: parsed_seeds(
                rng.choice(
                    ["0-4", "1,2", name, "3-1", "0-9" + name, "-", "1" * 30, "0-" + "9" * 30, f"{rng.choice(VALUES)}"]
                )
            ),
            lambda: True,
        )
    inside = place / "there"
    inside.mkdir(exist_ok=True)

    def load() -> Path:
        found = run_path(name) if kind == 0 else free_path(name)
        if found.is_absolute() or ".." in found.parts:
            return found  # a path was given, and paths are taken as they are
        folder = RunFolder(inside / found)
        with folder.lock():
            require((inside / found / "lock").is_file(), "a folder elsewhere")
        shutil.rmtree(inside, ignore_errors=True)
        return found

    def check(found: Path) -> None:
        single = len(Path(name).parts) == 1 and not Path(name).is_absolute() and Path(name).parts[0] not in (".", "..")
        require(kind != 0 or not single or found == Path("runs") / name, f"{name!r} became {found}")

    return attempt(load, lambda: True, check)


SURFACES = (
    Surface("load_bars", case_load_bars),
    Surface("data check", case_data_check),
    Surface("experiment", case_experiment),
    Surface("population", case_population_config),
    Surface("journal", case_journal),
    Surface("records", case_records),
    Surface("bundle", case_bundle),
    Surface("name", case_name),
)
