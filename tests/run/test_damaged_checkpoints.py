"""K3, K6: what is damaged is set aside; what is whole is not, and comes back if it was."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tailguard import DistributionalPPO
from tailguard.errors import CheckpointError
from tailguard.run import RunFolder, newest_checkpoint
from tests.run.test_exact_resume import PowerCut, cut_at
from tests.runs import STEPS_PER_UPDATE, begin, go_on, tiny_experiment, whole_state


def names(folder: RunFolder) -> list[str]:
    return sorted(entry.name for entry in folder.checkpoints.iterdir())


def altered(bundle: Path, **changes: Any) -> None:
    """Another manifest, whose checksum is right."""
    text = json.dumps({**json.loads((bundle / "manifest.json").read_text()), **changes})
    (bundle / "manifest.json").write_text(text)
    (bundle / "manifest.sha256").write_text(sha256(text.encode()).hexdigest())


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    """A run of two checkpoints; `longer` goes on with it."""
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(PowerCut):
        begin(folder, longer, cut_at(4 * STEPS_PER_UPDATE))
    assert names(folder) == ["step-256", "step-512"]
    return folder


longer = tiny_experiment("regime", updates=6)


@pytest.mark.parametrize(
    "changes", [{"schema_version": 99}, {"policy_config": {"lstm_hidden_size": 16, "net_arch": [8]}}, {"policy": "No"}]
)
def test_a_checkpoint_that_is_refused_stays_where_it_is_and_is_named(
    stopped: RunFolder, changes: dict[str, Any]
) -> None:
    altered(stopped.last_checkpoint(), **changes)
    with pytest.raises(CheckpointError, match="step-512"):
        go_on(stopped, longer)
    assert names(stopped) == ["step-256", "step-512"]


def test_another_environment_renames_nothing(stopped: RunFolder) -> None:
    with pytest.raises(ValueError, match="space"):
        go_on(stopped, tiny_experiment("cartpole"))
    assert names(stopped) == ["step-256", "step-512"]


def test_whole_checkpoints_that_were_set_aside_come_back_with_a_line_each(stopped: RunFolder, tmp_path: Path) -> None:
    uninterrupted = RunFolder(tmp_path / "uninterrupted")
    begin(uninterrupted, longer)
    for step in stopped.steps():
        stopped.checkpoint(step).rename(stopped.checkpoints / f"damaged-step-{step}")
    with pytest.warns(UserWarning, match="is whole after all; it is step-") as said:
        assert go_on(stopped, longer).finished
    assert len([line for line in said if "whole after all" in str(line.message)]) == 2
    assert whole_state(stopped.last_checkpoint()) == whole_state(uninterrupted.last_checkpoint())
    assert not [name for name in names(stopped) if name.startswith("damaged")]


def test_who_only_reads_a_run_finds_them_too(stopped: RunFolder) -> None:
    stopped.checkpoint(512).rename(stopped.checkpoints / "damaged-step-512")
    with pytest.warns(UserWarning, match="damaged-step-512 is whole after all; it is step-512 again"):
        assert newest_checkpoint(stopped) == stopped.checkpoint(512)
    assert DistributionalPPO.load(stopped.checkpoint(512)).num_timesteps == 4 * STEPS_PER_UPDATE


def test_damage_is_set_aside_beside_earlier_damage_and_never_trained_over(stopped: RunFolder, tmp_path: Path) -> None:
    whole = shutil.copytree(stopped.checkpoint(512), tmp_path / "whole")
    for number in (1, 2):
        for step in stopped.steps():
            file = stopped.checkpoint(step) / "state.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
        with pytest.warns(UserWarning, match="set aside"), pytest.raises(CheckpointError, match="can be read"):
            go_on(stopped, longer)
        if number == 1:
            assert names(stopped) == ["damaged-step-256", "damaged-step-512"]
            with pytest.raises(CheckpointError, match="can be read"):  # nor does a second try begin anew
                go_on(stopped, longer)
            shutil.copytree(whole, stopped.checkpoint(512))
    assert names(stopped) == ["damaged-step-256", "damaged-step-512", "damaged-step-512-2"]
