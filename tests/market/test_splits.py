from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.errors import ConfigError, DataError
from tailguard.market.splits import Segment, Split, SplitRules, chronological, picture, walk_forward

rules_of_any_size = st.builds(
    SplitRules,
    reward_horizon=st.integers(1, 10),
    fill_delay=st.integers(0, 3),
    look_back=st.integers(0, 60),
    warm_up=st.integers(0, 60),
)


def segments(split: Split) -> list[Segment]:
    return [part for part in (split.train, split.validation, split.test) if part is not None]


def assert_nothing_leaks(split: Split, rules: SplitRules, n_bars: int) -> None:
    for part in segments(split):
        assert part.start < part.stop
        assert part.start >= rules.look_back  # features of the first decision exist
        assert part.reward_stop == part.stop + rules.purge <= n_bars  # rewards of the last decision exist
    for before, after in pairwise(segments(split)):
        assert after.start - rules.look_back >= before.reward_stop  # no bar is in a learned reward and a judged feature
        assert before.reward_stop <= after.warm_start == after.start - rules.warm_up  # nor in the memory


@settings(max_examples=200)
@given(rules=rules_of_any_size, n_bars=st.integers(10, 3000), train=st.floats(0.1, 0.8), validation=st.floats(0, 0.8))
def test_a_chronological_split_keeps_its_segments_apart(rules, n_bars, train, validation):
    if train + validation > 0.95:
        return
    try:
        split = chronological(n_bars, rules, train=train, validation=validation)
    except DataError:
        return
    assert_nothing_leaks(split, rules, n_bars)
    assert split.test.reward_stop == n_bars  # no bar is wasted at the end


@settings(max_examples=200)
@given(
    rules=rules_of_any_size,
    n_bars=st.integers(10, 3000),
    folds=st.integers(1, 8),
    validation_bars=st.integers(0, 100),
    window=st.sampled_from(["sliding", "expanding"]),
    train_bars=st.none() | st.integers(1, 500),
    test_bars=st.none() | st.integers(1, 200),
)
def test_walk_forward_folds_keep_apart_and_join_into_one_curve(
    rules, n_bars, folds, validation_bars, window, train_bars, test_bars
):
    options = {"folds": folds, "validation_bars": validation_bars, "window": window}
    try:
        splits = walk_forward(n_bars, rules, train_bars=train_bars, test_bars=test_bars, **options)
    except DataError as error:
        needed = int(str(error).split("at least ")[1].split(".")[0])
        enough = walk_forward(needed, rules, train_bars=train_bars, test_bars=test_bars, **options)
        assert len(enough) == folds  # the number the error names is enough
        return
    assert len(splits) == folds
    for split in splits:
        assert_nothing_leaks(split, rules, n_bars)
        assert split.validation is None or len(split.validation) == validation_bars
    for before, after in pairwise(splits):
        assert after.test.start == before.test.stop  # one curve without a hole or an overlap
        assert len(after.train) == len(before.train) if window == "sliding" else after.train.start == before.train.start
    assert splits[-1].test.reward_stop == n_bars


def test_the_error_says_how_many_bars_are_needed():
    rules = SplitRules(look_back=64, warm_up=32)
    with pytest.raises(DataError, match=r"202 bars are too few .* at least 203"):
        chronological(202, rules)
    assert len(segments(chronological(203, rules))) == 3


def test_purge_and_embargo_are_those_of_the_design():
    rules = SplitRules(reward_horizon=5, fill_delay=2, look_back=30, warm_up=50)
    assert (rules.purge, rules.embargo, rules.gap) == (7, 50, 57)


def test_shares_that_leave_no_test_and_odd_folds_are_refused():
    with pytest.raises(ConfigError, match="leave some bars for test"):
        chronological(1000, SplitRules(), train=0.7, validation=0.3)
    with pytest.raises(ConfigError, match="do not describe a walk-forward"):
        walk_forward(1000, SplitRules(), folds=0)
    with pytest.raises(ConfigError, match="do not describe a walk-forward"):
        walk_forward(1000, SplitRules(), window="rolling")  # type: ignore[arg-type]


def test_the_picture_shows_every_part():
    text = picture(walk_forward(1000, SplitRules(look_back=40), folds=3, validation_bars=100), width=60)
    assert [len(line) for line in text.split("\n")] == [60] * 3
    assert all(set(line) >= set("tvTw") for line in text.split("\n"))


ORACLES = """
import json, sys
import numpy as np, pandas as pd
from purgedcv import WalkForwardSplit
from skfolio.model_selection import WalkForward

answers = []
for case in json.load(sys.stdin):
    n, ts = case["n"], pd.Series(pd.date_range("2024-01-01", periods=case["n"], freq="h"))
    # A reward reaches `purge` bars ahead, that bar included; the embargo pads the test labels.
    folds = WalkForwardSplit(
        case["folds"], case["test"], train_size=None if case["expanding"] else case["train"],
        window="expanding" if case["expanding"] else "sliding", prediction_times=ts,
        evaluation_times=ts + pd.Timedelta(hours=case["purge"] + 1), purge_horizon=pd.Timedelta(hours=case["embargo"]),
    )
    purged = [[train.tolist(), test.tolist()] for train, test in folds.split(np.zeros((n, 1)))]
    folds = WalkForward(
        test_size=case["test"], train_size=case["train"], expand_train=case["expanding"],
        purged_size=case["purge"] + case["embargo"],
    )
    answers.append([purged, [[train.tolist(), test.tolist()] for train, test in folds.split(np.zeros((n, 1)))]])
json.dump(answers, sys.stdout)
"""


@pytest.mark.slow
def test_walk_forward_agrees_with_purgedcv_and_skfolio(tmp_path):
    """Both are installed beside the tests' own packages, not among them: skfolio brings a convex solver."""
    packages = ["purgedcv==0.1.11", "skfolio==1.12.2", "cvxpy-base", "clarabel", "qdldl", "plotly"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the oracles cannot be installed here: {done.stderr[-300:]}")
    cases, ours = [], []
    for folds, train, test, horizon, delay, warm_up, expanding in [
        (5, 200, 50, 1, 1, 0, False),
        (5, 200, 50, 1, 1, 32, False),
        (3, 150, 40, 6, 2, 10, True),
        (8, 64, 16, 3, 1, 7, True),
        (1, 100, 30, 1, 0, 5, False),
        (4, 90, 25, 12, 1, 64, False),
    ]:
        rules = SplitRules(reward_horizon=horizon, fill_delay=delay, warm_up=warm_up)
        n = train + rules.gap + folds * test  # the oracles let the last rewards run beyond the data, we do not
        window = "expanding" if expanding else "sliding"
        splits = walk_forward(n + rules.purge, rules, folds=folds, train_bars=train, test_bars=test, window=window)
        ours.append([[list(range(n))[s.train.rows], list(range(n))[s.test.rows]] for s in splits])
        cases.append(
            {"n": n, "folds": folds, "train": train, "test": test, "purge": rules.purge, "embargo": rules.embargo}
            | {"expanding": expanding}
        )
    answer = subprocess.run(
        [sys.executable, "-c", ORACLES],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"},
    )
    for mine, (purged, skfolio) in zip(ours, json.loads(answer.stdout), strict=True):
        assert mine == purged
        assert mine == skfolio
