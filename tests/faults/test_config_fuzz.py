"""A thousand mutated configurations: exit code 0 or 2, one clear message, never a traceback."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tailguard.cli import main
from tailguard.experiment import experiment_config

pytestmark = pytest.mark.slow

SNIPPETS = (
    "\t", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "!!python/object/apply:os.system ", "<<: ", "? ", "| ", "> ",
    "'", '"', "#", "\n\n", "\n  ", "9" * 40, "-1", "1e999", ".nan", "null", "yes", "gama: 1\n", "preset: nope\n", "%",
    "@", "`", "\0", "\x07", "\ufeff", "é", "---\n", "...\n", "seed: seed\n", "ppo: 3\n", "n_envs: 0\n", "&x [*x]",
)  # fmt: skip


def mutated(text: str, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        lines = text.split("\n")
        at, kind = rng.randrange(len(text)), rng.randrange(6)
        if kind == 0:
            text = text[:at] + rng.choice(SNIPPETS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rng.randint(1, 12) :]
        elif kind == 2:
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            text = "\n".join(lines)
        elif kind == 3:
            first, second = rng.sample(range(len(lines)), 2)
            lines[first], lines[second] = lines[second], lines[first]
            text = "\n".join(lines)
        elif kind == 4:
            row = rng.randrange(len(lines))
            lines[row] = rng.choice(("  ", "    ", "")) + lines[row].strip()
            text = "\n".join(lines)
        else:
            text = text[:at] + chr(rng.randrange(1, 0x2FFF)) + text[at + 1 :]
        text = text or "a"
    data = text.encode("utf-8", "surrogatepass")
    return data if rng.random() < 0.97 else data[: len(data) // 2] + b"\xff\xfe" + data[len(data) // 2 :]


def test_a_mutated_configuration_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, rng = experiment_config({"preset": "regime"}).to_yaml(), random.Random(2)
    outcomes = {0: 0, 2: 0}
    for number in range(1000):
        Path("c.yaml").write_bytes(data := mutated(text, rng))
        monkeypatch.setattr(sys, "argv", ["tailguard", "train", "c.yaml", "--dry-run"])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        code = int(end.value.code or 0)
        outcomes[code] += 1
        assert "Traceback" not in said.err + said.out, (number, data)
        if code == 2:
            assert said.err.startswith("tailguard: "), (number, data)
            assert len(said.err.strip()) > 20
    assert outcomes[2] > 500
    print(f"{outcomes[2]} refused, {outcomes[0]} still meant something")
