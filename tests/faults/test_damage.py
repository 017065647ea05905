"""K2, K3: a thousand damaged or hostile bundles: each is named, none runs code or loads wrong weights, none crashes."""

from __future__ import annotations

import json
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common.vec_env import VecEnv

from tailguard import DistributionalPPO
from tailguard.checkpoint import read_bundle, state_digest
from tailguard.errors import CheckpointError
from tailguard.run import RunFolder
from tailguard.run.checkpoints import newest_good
from tests.agents import tiny_agent
from tests.environments import cartpole

pytestmark = pytest.mark.slow

FILES = ("state.safetensors", "tree.json", "manifest.json", "manifest.sha256")
Damage = Callable[[Path, Path, random.Random], None]


@pytest.fixture(scope="module")
def env() -> VecEnv:
    return cartpole(4, 0)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, env: VecEnv) -> RunFolder:
    """A run with an older and a newer checkpoint."""
    folder, agent = RunFolder(tmp_path_factory.mktemp("good")), tiny_agent(env)
    for updates in (1, 2):
        agent.learn(128, reset_num_timesteps=updates == 1)
        agent.checkpoint(folder.checkpoint(agent.num_timesteps))
    return folder


# damage by accident


def flip(new: Path, old: Path, rng: random.Random) -> None:
    file = new / rng.choice(FILES)
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(new: Path, old: Path, rng: random.Random) -> None:
    file = new / rng.choice(FILES)
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def extend(new: Path, old: Path, rng: random.Random) -> None:
    file = new / rng.choice(FILES[:3])
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 2000)))


def remove(new: Path, old: Path, rng: random.Random) -> None:
    (new / rng.choice(FILES)).unlink()


def rename(new: Path, old: Path, rng: random.Random) -> None:
    name = rng.choice(FILES)
    (new / name).rename(new / f"{name}.bak")


def swap(new: Path, old: Path, rng: random.Random) -> None:
    first, second = rng.sample(FILES, 2)
    (new / first).rename(new / "aside")
    (new / second).rename(new / first)
    (new / "aside").rename(new / second)


def mix(new: Path, old: Path, rng: random.Random) -> None:
    """One file of the older checkpoint, itself undamaged."""
    name = rng.choice(FILES)
    shutil.copy(old / name, new / name)


def zero(new: Path, old: Path, rng: random.Random) -> None:
    file = new / rng.choice(FILES)
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 4096] = b"\0" * len(data[start : start + 4096])
    if bytes(data) == file.read_bytes():
        data[-1] ^= 1
    file.write_bytes(data)


def link(new: Path, old: Path, rng: random.Random) -> None:
    file = new / rng.choice(FILES)
    file.unlink()
    file.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", str(old / file.name))))


def directory(new: Path, old: Path, rng: random.Random) -> None:
    file = new / rng.choice(FILES)
    file.unlink()
    file.mkdir()


# damage on purpose: the checksums are right


def sign(bundle: Path, manifest: dict[str, Any]) -> None:
    for name in ("tree.json", "state.safetensors"):
        data = (bundle / name).read_bytes()
        if isinstance(manifest.get("files"), dict):
            manifest["files"][name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    text = json.dumps(manifest)
    (bundle / "manifest.json").write_text(text)
    (bundle / "manifest.sha256").write_text(sha256(text.encode()).hexdigest())


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON tree."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, child in children for spot in spots(child, (*path, key)))]


EVIL: tuple[Any, ...] = (
    None, -1, 10**30, 1e308, float("nan"), True, "", "__import__('os').system('touch /tmp/tailguard-hacked')",
    [], {}, {"$tensor": "../../etc/passwd"}, {"$array": "/missing"}, {"$items": 3}, {"$items": [[1]]}, {"$tuple": None},
    {"__reduce__": ["os.system", "touch /tmp/tailguard-hacked"]}, [[[[[[]]]]]], 2**63, "!!python/object:os.system",
)  # fmt: skip


def graft(new: Path, name: str, rng: random.Random) -> None:
    """Something evil at a random place of a JSON file."""
    manifest = json.loads((new / "manifest.json").read_text())
    tree = json.loads((new / name).read_text())
    path = rng.choice(spots(tree)[1:])
    at = tree
    for key in path[:-1]:
        at = at[key]
    if rng.random() < 0.2 and isinstance(at, dict):
        del at[path[-1]]
    else:
        at[path[-1]] = rng.choice(EVIL)
    (new / name).write_text(json.dumps(tree))
    sign(new, tree if name == "manifest.json" else manifest)


def graft_tree(new: Path, old: Path, rng: random.Random) -> None:
    graft(new, "tree.json", rng)


def graft_manifest(new: Path, old: Path, rng: random.Random) -> None:
    graft(new, "manifest.json", rng)


def deep(new: Path, old: Path, rng: random.Random) -> None:
    manifest = json.loads((new / "manifest.json").read_text())
    depth = rng.choice((500, 5_000, 500_000))
    (new / "tree.json").write_text('{"parts": ' + "[" * depth + "]" * depth + "}")
    sign(new, manifest)


def reshape(new: Path, old: Path, rng: random.Random) -> None:
    """Another shape, type or range for a tensor in the header of the tensor file."""
    manifest = json.loads((new / "manifest.json").read_text())
    data = (new / "state.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    what = rng.randrange(5)
    if what == 0:
        header[name]["shape"] = [rng.choice((0, 1, 7, 10**15)), *header[name]["shape"]]
    elif what == 1:
        header[name]["dtype"] = rng.choice(("F64", "BOOL", "BF16", "I8", "XX"))
    elif what == 2:
        header[name]["data_offsets"] = [0, rng.choice((1, 10**12, 2**63))]
    elif what == 3:
        header[name]["shape"] = [*header[name]["shape"][::-1], 1]
    else:
        del header[name]
    text = json.dumps(header).encode()
    length = len(text) if what != 4 or rng.random() < 0.5 else 2**62
    (new / "state.safetensors").write_bytes(struct.pack("<Q", length) + text + data[8 + size :])
    sign(new, manifest)


ACCIDENTS: tuple[Damage, ...] = (
    flip,
    flip,
    flip,
    truncate,
    truncate,
    extend,
    remove,
    rename,
    swap,
    mix,
    zero,
    link,
    directory,
)
ATTACKS: tuple[Damage, ...] = (graft_tree, graft_tree, graft_manifest, graft_manifest, deep, reshape, reshape)


def damaged_copy(good: RunFolder, place: Path, damage: Damage, rng: random.Random) -> RunFolder:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good.path, place, symlinks=True)
    folder = RunFolder(place)
    old, new = (folder.checkpoint(step) for step in folder.steps())
    damage(new, old, rng)
    return folder


def test_damage_by_accident_is_named_and_the_older_one_used(tmp_path: Path, good: RunFolder, env: VecEnv) -> None:
    older = state_digest(read_bundle(good.checkpoint(128))[0]["parts"])
    rng = random.Random(0)
    for number in range(650):
        damage = ACCIDENTS[number % len(ACCIDENTS)]
        folder = damaged_copy(good, tmp_path / "run", damage, rng)
        if not differs(folder.checkpoint(256), good.checkpoint(256)):
            continue  # such as one of two equal files put in the place of the other
        with pytest.warns(UserWarning, match=r"step-256"):
            agent = newest_good(folder, lambda: env, exact=True)
        assert agent is not None
        assert state_digest({name: part.state_dict() for name, part in agent.parts().items()}) == older, damage.__name__


def differs(a: Path, b: Path) -> bool:
    return any(not (a / name).is_file() or (a / name).read_bytes() != (b / name).read_bytes() for name in FILES)


def refusal(work: Callable[[], Any]) -> str | None:
    """What the error says; None without one, when a value is allowed where it stands."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return None


def test_damage_on_purpose_is_refused_or_harmless(tmp_path: Path, good: RunFolder, env: VecEnv) -> None:
    hacked = Path("/tmp/tailguard-hacked")  # noqa: S108
    hacked.unlink(missing_ok=True)
    rng, refused, loaded = random.Random(1), 0, 0
    for number in range(350):
        folder = damaged_copy(good, tmp_path / "run", ATTACKS[number % len(ATTACKS)], rng)
        place = folder.checkpoint(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = refusal(lambda place=place: DistributionalPPO.resume(place, env))
        assert said is None or "step-256" in said
        refused, loaded = refused + (said is not None), loaded + (said is None)
    assert not hacked.exists()
    assert refused > 200
    print(f"{refused} refused, {loaded} loaded as what they say")
