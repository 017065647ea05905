"""The trial ledger: rows that only grow, counted by what could have been picked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tailguard.errors import DataError
from tailguard.evaluation import ledger
from tailguard.evaluation.ledger import Trial


def trial(sharpe: float = 0.1, **changes) -> Trial:
    base = Trial("bars", "test", "run", 0, None, "settings", 1_000, 500, sharpe, Trial.digest(np.array([sharpe])))
    return replace(base, **changes)


def test_rows_come_back_as_they_were_written_and_the_file_only_grows(tmp_path):
    for sharpe in (0.1, 0.2):
        ledger.record(tmp_path / "a", trial(sharpe))
    found = ledger.read(tmp_path / "a")
    assert [row.sharpe_per_bar for row in found] == [0.1, 0.2]
    assert all(row.time for row in found)
    assert ledger.read(tmp_path / "none") == []


def test_looking_twice_at_one_result_is_one_trial(tmp_path):
    for _ in range(3):
        ledger.record(tmp_path / "a", trial(0.1))
    ledger.record(tmp_path / "b", trial(0.3, run="other", seed=1))
    found = ledger.count(ledger.gather(tmp_path, "bars", "test"))
    assert (found.n_trials, found.n_looks) == (2, 4)
    assert_allclose(found.sharpe_variance_per_bar, np.var([0.1, 0.3], ddof=1))


def test_only_the_same_split_of_the_same_data_counts(tmp_path):
    ledger.record(tmp_path / "a", trial(0.1))
    ledger.record(tmp_path / "b", trial(0.2, split="validation"))
    ledger.record(tmp_path / "c", trial(0.3, data="other bars"))
    assert ledger.count(ledger.gather(tmp_path, "bars", "test")) == (1, 1, 0.0)


def test_a_damaged_row_is_named(tmp_path):
    ledger.record(tmp_path, trial())
    with (tmp_path / ledger.FILE).open("a") as file:
        file.write('{"data": "ba\n')
    with pytest.raises(DataError, match="line 2 is not a trial"):
        ledger.read(tmp_path)
