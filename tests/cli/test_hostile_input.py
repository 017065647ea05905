"""Input that no command can use: one clear message and exit code 2, soon, and nothing is written or lost."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from pathlib import Path

import polars as pl
import pytest

from tailguard import DistributionalPPO
from tailguard.cli import main
from tailguard.errors import ConfigError, DataError
from tailguard.market import load_bars
from tailguard.market.check import check_file
from tailguard.market.tables import refuse_more_than_memory
from tailguard.market.unpacked import refuse_bomb
from tailguard.run import run_path
from tests.agents import tiny_agent
from tests.environments import cartpole

HEADER = b"ts,open,high,low,close,volume\n"


def refused(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["tailguard", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2, said
    assert said.err.startswith("tailguard: ")
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    "setting",
    [
        "ppo.torch_threads=100000",
        "ppo.update_threads=100000",
        "ppo.n_epochs=1000000000",
        "ppo.n_steps=100000000000000000000",
        "n_envs=100000000000",
        "n_envs=1e11",
        f"seed={10**26}",
        f"steps={10**30}",
        "checkpoint.keep_last=1000000000000000000000000",
        "policy_kwargs.lstm_hidden_size=10000000",
        "policy_kwargs.activation_fn={a: 1}",
        "ppo.adversary.restarts=100000000000",
    ],
)
def test_a_number_that_nothing_could_hold_is_refused_by_its_name(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused("train", "--preset", "regime", "--set", setting, monkeypatch=monkeypatch, capsys=capsys)
    name = setting.split("=")[0].split(".")[-1]
    assert name in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [10**26, 2**32, -1])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="takes seeds from 0 to 4294967295"):
        DistributionalPPO("MlpLstmPolicy", cartpole(1, 0), seed=seed)


def test_the_largest_seed_trains() -> None:
    assert tiny_agent(seed=2**32 - 1).learn(128).num_timesteps == 128


@pytest.mark.parametrize("seeds", ["0-99999999999", "0,1-999999999"])
def test_more_seeds_than_anybody_trains_are_refused_before_they_are_counted_out(
    seeds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("train", "--preset", "regime", "--seeds", seeds, monkeypatch=monkeypatch, capsys=capsys)
    assert "at most 10,000" in said


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a" * 300, "has 300 bytes; at most 200 fit"),
        ("é" * 150, "has 300 bytes"),
        ("", "is empty"),
        ("one\ntwo", "holds the character '\\n'"),
        ("bell\x07", "holds the character '\\x07'"),
        ("nul\0", "holds the character '\\x00'"),
        ("\udcff", "holds the character '\\udcff'"),
        ("/runs" + "/deep" * 1000, "at most 2,000 fit"),
    ],
)
def test_a_name_that_no_file_system_takes_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match="The name of a run") as refusal:
        run_path(name)
    assert why in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("command", ["train", "resume", "evaluate", "attack", "report", "population"])
def test_every_command_refuses_such_a_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    population = tmp_path / "p.yaml"
    population.write_text("preset: regime\npopulation: {hyperparams: [{name: ent_coef, low: 0, high: 1}]}\n")
    before = {"train": ("--preset", "regime", "--run"), "population": (str(population), "--run")}
    said = refused(command, *before.get(command, ()), "a" * 300, monkeypatch=monkeypatch, capsys=capsys)
    assert "at most 200 fit" in said
    assert [file.name for file in tmp_path.iterdir()] == ["p.yaml"]


@pytest.mark.parametrize("command", [("train",), ("train", "--data"), ("data", "check"), ("population",)])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened_for_ever(
    command: tuple[str, ...],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe, folder = tmp_path / "bars.csv", tmp_path / "folder.csv"
    os.mkfifo(pipe)
    folder.mkdir()
    place = {"pipe": pipe, "device": Path("/dev/zero"), "folder": folder}[kind]
    said = refused(*command, str(place), monkeypatch=monkeypatch, capsys=capsys)
    assert f"is a {kind}, not a regular file" in said


def test_a_configuration_without_end_is_refused_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "long.yaml"
    with file.open("wb") as opened:
        opened.truncate(2**40)  # a hole: it takes no room
    said = refused("train", str(file), monkeypatch=monkeypatch, capsys=capsys)
    assert "has 1,099,511,627,776 bytes; such a file has at most 1,048,576" in said


def gzip_bomb(unpacked: int) -> bytes:
    packer, zeros = zlib.compressobj(9, zlib.DEFLATED, 31), b"0" * 2**20
    return b"".join([*(packer.compress(zeros) for _ in range(unpacked // 2**20)), packer.flush()])


def zstd_bomb(n_blocks: int) -> bytes:
    """Blocks that each repeat one byte 128 KiB long: four bytes for each (RFC 8878)."""
    block = (1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"0"
    return b"\x28\xb5\x2f\xfd" + b"\x00\x58" + block * n_blocks + (1).to_bytes(3, "little")


@pytest.mark.parametrize("name", ["bomb.csv.gz", "bomb.csv", "bomb.csv.zst"])
def test_a_packed_file_out_of_all_proportion_is_refused_before_it_is_unpacked(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(zstd_bomb(30_000) if name.endswith("zst") else gzip_bomb(300 * 2**20))
    for read in (load_bars, check_file):
        with pytest.raises(DataError, match=r"unpacks to .* or more, over 200 times it"):
            read(file)


def rows_of(n: int) -> bytes:
    stamps = (f"2024-01-{1 + i // 24:02d}T{i % 24:02d}:00:00Z" for i in range(n))
    return HEADER + b"".join(f"{stamp},1,1,1,1,1\n".encode() for stamp in stamps)


@pytest.mark.parametrize("packing", ["none", "gzip", "two gzips", "zlib", "zstd"])
def test_packed_bars_are_counted_exactly_and_load(packing: str, tmp_path: Path) -> None:
    rows, file = rows_of(240), tmp_path / "bars.csv"
    if packing == "zstd":
        zstd = file.with_suffix(".csv.zst")
        pl.read_csv(rows, infer_schema=False).lazy().sink_csv(zstd, compression="zstd")
        assert 0 < refuse_bomb(zstd) - len(rows) < 2**17
        assert len(load_bars(zstd)) == 240
        return
    half = len(rows) // 2
    parts = {"two gzips": gzip.compress(rows[:half]) + gzip.compress(rows[half:]), "gzip": gzip.compress(rows)}
    file.write_bytes({**parts, "zlib": zlib.compress(rows), "none": rows}[packing])
    assert refuse_bomb(file) == len(rows)
    assert len(load_bars(file)) == 240


def test_a_table_of_one_value_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    row = pl.DataFrame({name: [1.0] for name in ("ts", "open", "high", "low", "close")})
    row.write_parquet(tmp_path / "one.parquet")
    million = pl.concat([pl.scan_parquet(tmp_path / "one.parquet")] * 1000)
    refuse_more_than_memory(million, Path("million.parquet"), available=40_000)
    with pytest.raises(DataError, match=r"1,000 rows of 5 columns, which are more than the memory"):
        refuse_more_than_memory(million, Path("million.parquet"), available=39_999)


@pytest.mark.parametrize("unit", ["ms", "us"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_years_that_no_clock_shows_are_named_and_do_not_break_the_reader(unit: str, zone: str | None) -> None:
    stamps = pl.Series([2**62, 2**62 + 1]).cast(pl.Datetime(unit, zone))  # type: ignore[arg-type]
    prices = {name: [1.0, 1.0] for name in ("open", "high", "low", "close", "volume")}
    source = pl.DataFrame({"ts": stamps, **prices})
    with pytest.raises(DataError, match="not one of the years 1600 to 2999"):
        load_bars(source, tz=None if zone else "Europe/London")
    assert "bad_stamp" in check_file(source).codes("error")


@pytest.mark.parametrize("stamp", ["9999-12-31 23:00", "0001-01-01 00:00", "2021-01-01 00:00+99:99"])
@pytest.mark.parametrize("tz", ["America/New_York", "Pacific/Apia"])
def test_text_of_such_years_and_zones_is_named_too(stamp: str, tz: str, tmp_path: Path) -> None:
    file = tmp_path / "bars.csv"
    file.write_bytes(HEADER + f"{stamp},1,1,1,1,1\n".encode() * 2)
    with pytest.raises(DataError, match=r"line 2: .*not one of the years 1600 to 2999"):
        load_bars(file, tz=None if "+" in stamp else tz)
    assert "bad_stamp" in check_file(file, tz=tz).codes("error")
