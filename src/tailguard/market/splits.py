"""Splits: which bars teach, which choose, which judge, and the bars between that do none of these.

    train | purge | embargo | validation | purge | embargo | test | purge

A decision at bar t reads the bars t - look_back .. t and its reward reaches bar t + purge. So with `purge` bars after a
segment's last decision and `embargo` bars before the next segment's first, no bar is both in a reward that was learned
from and in a feature that is judged. The policy's memory is warmed on embargo bars, without trading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from tailguard.configuration import Config, NonNegativeInt, PositiveInt
from tailguard.errors import ConfigError, DataError


class SplitRules(Config):
    """What a split must keep apart, in bars."""

    reward_horizon: PositiveInt = 1
    """Bars over which the reward of one decision is earned."""
    fill_delay: NonNegativeInt = 1
    """Bars between a decision and its fill."""
    look_back: NonNegativeInt = 0
    """Longest look-back of the features (`FeatureSet.look_back`)."""
    warm_up: NonNegativeInt = 0
    """Bars on which the recurrent policy's memory is warmed before a segment's first decision."""

    @property
    def purge(self) -> int:
        """Bars after a decision that its reward can reach."""
        return self.reward_horizon + self.fill_delay

    @property
    def embargo(self) -> int:
        """Bars unused before a segment, so that its first features and its memory do not reach into the last one."""
        return max(self.look_back, self.warm_up)

    @property
    def gap(self) -> int:
        """Bars between the last decision of one segment and the first of the next."""
        return self.purge + self.embargo


@dataclass(frozen=True)
class Segment:
    """Decisions at bars start .. stop - 1, memory warmed from warm_start, rewards up to reward_stop - 1."""

    start: int
    stop: int
    warm_start: int
    reward_stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Bars at which decisions are made: what a scaler may be fitted on, for train."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Split:
    """One train, perhaps one validation, and one test segment, in this order in time."""

    train: Segment
    validation: Segment | None
    test: Segment


def chronological(n_bars: int, rules: SplitRules, *, train: float = 0.6, validation: float = 0.2) -> Split:
    """One split by shares of the bars that can be used; what `train` and `validation` leave is test."""
    if not (0 < train < 1 and 0 <= validation < 1 and train + validation < 1):
        raise ConfigError(f"train={train} and validation={validation} must be shares that leave some bars for test.")
    gaps = (2 if validation else 1) * rules.gap + rules.purge
    usable = n_bars - rules.look_back - gaps
    smallest = min(share for share in (train, validation, 1 - train - validation) if share > 1e-12)
    _require(n_bars, rules.look_back + gaps + ceil(1 / smallest - 1e-9), rules, "a chronological split")
    n_validation = max(1, int(usable * validation)) if validation else 0
    n_train = max(1, int(usable * train))
    first = _segment(rules.look_back, n_train, rules, warm=False)
    if not validation:
        return Split(first, None, _segment(first.stop + rules.gap, usable - n_train, rules))
    second = _segment(first.stop + rules.gap, n_validation, rules)
    return Split(first, second, _segment(second.stop + rules.gap, usable - n_train - n_validation, rules))


def walk_forward(
    n_bars: int,
    rules: SplitRules,
    *,
    folds: int = 5,
    train_bars: int | None = None,
    validation_bars: int = 0,
    test_bars: int | None = None,
    window: Literal["sliding", "expanding"] = "sliding",
) -> tuple[Split, ...]:
    """`folds` splits whose test segments follow one another without a hole and end with the data.

    Without `test_bars`, train is four times as long as test. A sliding window keeps the length of train, an expanding
    one its start; bars that do not divide evenly are left out at the start (sliding) or taken into train (expanding).
    """
    sizes = [size for size in (train_bars, test_bars) if size is not None]
    if min(folds, *sizes, 1) < 1 or validation_bars < 0 or window not in ("sliding", "expanding"):
        raise ConfigError(
            f"folds={folds}, validation_bars={validation_bars}, window={window!r} do not describe a walk-forward."
        )
    between = rules.gap + (validation_bars + rules.gap if validation_bars else 0)
    usable = n_bars - rules.look_back - between - rules.purge
    what = f"a walk-forward of {folds} folds"
    fixed = rules.look_back + between + rules.purge
    if test_bars is None:
        test_bars = (usable - train_bars) // folds if train_bars is not None else usable // (folds + 4)
        needed = fixed + (train_bars + folds if train_bars is not None else folds + 4)
    else:
        needed = fixed + folds * test_bars + (train_bars or 1)
    _require(n_bars, needed, rules, what)
    longest = usable - folds * test_bars
    if train_bars is None:
        train_bars = longest
    splits = []
    for fold in range(folds):
        test = _segment(n_bars - rules.purge - (folds - fold) * test_bars, test_bars, rules)
        train_stop = test.start - between
        start = rules.look_back if window == "expanding" else train_stop - train_bars
        train = _segment(start, train_stop - start, rules, warm=False)
        chosen = _segment(train_stop + rules.gap, validation_bars, rules) if validation_bars else None
        splits.append(Split(train, chosen, test))
    return tuple(splits)


def picture(splits: Split | Sequence[Split], width: int = 72) -> str:
    """The splits as text, one line each: t train, v validation, T test, w warm-up and embargo, . unused."""
    splits = [splits] if isinstance(splits, Split) else list(splits)
    n_bars = max(split.test.reward_stop for split in splits)
    return "\n".join(_line(split, n_bars, width) for split in splits)


def _segment(start: int, length: int, rules: SplitRules, *, warm: bool = True) -> Segment:
    stop = start + length
    return Segment(start, stop, start - rules.warm_up if warm else start, stop + rules.purge)


def _require(n_bars: int, needed: int, rules: SplitRules, what: str) -> None:
    if n_bars < needed:
        raise DataError(
            f"{n_bars} bars are too few for {what}: it needs at least {needed}. Between segments lie {rules.purge} "
            f"bars of purge and {rules.embargo} of embargo. Use more bars, fewer folds, shorter windows or warm-up."
        )


def _line(split: Split, n_bars: int, width: int) -> str:
    """Each character stands for n_bars / width bars and shows what its middle is."""
    chars = []
    for i in range(width):
        t = (2 * i + 1) * n_bars // (2 * width)
        named = [("t", split.train), ("v", split.validation), ("T", split.test)]
        mark = next((mark for mark, part in named if part is not None and part.start <= t < part.stop), "")
        inside = split.train.stop <= t < split.test.start
        chars.append(mark or ("w" if inside else "."))
    return "".join(chars)
