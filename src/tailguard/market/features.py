"""Features: what is known at the close of bar t, from bar t and the bars before it, and from nothing else.

Each feature declares how far it looks back, because splits need that figure. Windows are finite (no exponential
averages, whose memory has no end) and each value is computed from its own window alone, so a value depends neither on
later bars nor on where the data starts.

A window counts a symbol's own bars. Where a symbol has no bar, its features keep their last value, because nothing new
is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tailguard.errors import ConfigError, DataError, StateError, did_you_mean
from tailguard.market.bar_rules import Floats
from tailguard.market.bars import Bars
from tailguard.stateful import require_keys

_CHUNK = 1 << 20  # cells of a rolling window held in memory at once


@dataclass(frozen=True)
class Feature:
    """A named causal function of bars: (T, A) values, NaN in the first `look_back` bars of each symbol."""

    name: str
    look_back: int
    function: Callable[[Bars], Floats] = field(repr=False)
    meaning: str = ""

    def __call__(self, bars: Bars) -> Floats:
        values = self.function(bars)
        expected = bars.close.shape
        if values.shape != expected:
            raise DataError(f"Feature {self.name!r} returned shape {values.shape}; bars of this shape need {expected}.")
        return values


@dataclass(frozen=True)
class Own:
    """The bars one symbol has, gaps closed: vectors of equal length."""

    open: Floats
    high: Floats
    low: Floats
    close: Floats
    volume: Floats


def own_bars_feature(name: str, look_back: int, kernel: Callable[[Own], Floats], meaning: str = "") -> Feature:
    """A feature from a function of one symbol's own bars; its first `look_back` values are blanked."""

    def function(bars: Bars) -> Floats:
        out = np.full(bars.close.shape, np.nan)
        for a in range(len(bars.symbols)):
            here = bars.tradable[:, a]
            own = Own(*(panel[here, a] for panel in (bars.open, bars.high, bars.low, bars.close, bars.volume)))
            values = np.full(len(own.close), np.nan)
            if len(own.close) > look_back:
                values[look_back:] = kernel(own)[look_back:]
            latest = np.cumsum(here) - 1  # index of the symbol's newest bar at each t; -1 before its first
            out[:, a] = np.where(latest >= 0, values[latest], np.nan) if len(values) else np.nan
        return out

    return Feature(name, look_back, function, meaning)


def rolling(values: Floats, window: int, reduce: Callable[..., Any]) -> Floats:
    """reduce(last `window` values, axis=-1) at each t; NaN before there are that many. Memory stays bounded."""
    out = np.full(len(values), np.nan)
    if len(values) < window:
        return out
    windows = np.lib.stride_tricks.sliding_window_view(values, window)
    rows = max(1, _CHUNK // window)
    for start in range(0, len(windows), rows):
        part = np.ascontiguousarray(windows[start : start + rows])
        out[window - 1 + start : window - 1 + start + len(part)] = reduce(part, axis=-1)
    return out


def log_return(n: int) -> Feature:
    """ln(close[t] / close[t - n])."""

    def kernel(own: Own) -> Floats:
        log_close = np.log(own.close)
        return _shifted_difference(log_close, n)

    return own_bars_feature(f"return_{n}", n, kernel, f"log return over {n} bars")


def volatility(n: int) -> Feature:
    """Standard deviation of the last n one-bar log returns."""
    return own_bars_feature(
        f"volatility_{n}", n, lambda own: _volatility(own, n), f"deviation of {n} one-bar log returns"
    )


def volatility_ratio(n: int) -> Feature:
    """ln of the volatility over n bars against that over 4 n: is the market waking up or calming down?"""

    def kernel(own: Own) -> Floats:
        return _log_ratio(_volatility(own, n), _volatility(own, 4 * n))

    return own_bars_feature(f"volatility_ratio_{n}", 4 * n, kernel, f"ln of volatility over {n} bars against {4 * n}")


def atr(n: int) -> Feature:
    """Mean true range of n bars over the close."""

    def kernel(own: Own) -> Floats:
        before = np.concatenate([own.open[:1], own.close[:-1]])
        true_range = np.maximum(own.high, before) - np.minimum(own.low, before)
        return rolling(true_range, n, np.mean) / own.close

    return own_bars_feature(f"atr_{n}", n, kernel, f"mean true range of {n} bars over the close")


def rsi(n: int) -> Feature:
    """Relative strength with simple averages over n bars, from -1 (only losses) to 1 (only gains)."""

    def kernel(own: Own) -> Floats:
        moves = _one_bar_moves(own)
        net, gross = rolling(moves, n, np.sum), rolling(np.abs(moves), n, np.sum)
        return _safe_divide(net, gross)

    return own_bars_feature(f"rsi_{n}", n, kernel, f"gains less losses over both, {n} bars, in [-1, 1]")


def zscore(n: int) -> Feature:
    """Log close against its mean over n bars, in deviations of the same window."""

    def kernel(own: Own) -> Floats:
        log_close = np.log(own.close)
        return _safe_divide(log_close - rolling(log_close, n, np.mean), rolling(log_close, n, _deviation))

    return own_bars_feature(f"zscore_{n}", n - 1, kernel, f"log close against its mean over {n} bars, in deviations")


def range_position(n: int) -> Feature:
    """Where the close stands between the lowest low (-1) and the highest high (1) of n bars."""

    def kernel(own: Own) -> Floats:
        low, high = rolling(own.low, n, np.min), rolling(own.high, n, np.max)
        return _safe_divide(2.0 * own.close - high - low, high - low)

    return own_bars_feature(f"range_position_{n}", n - 1, kernel, f"close between the extremes of {n} bars, in [-1, 1]")


def volume_ratio(n: int) -> Feature:
    """ln(1 + volume / its mean over n bars) - ln 2: 0 at the usual volume, and 0 when there is no volume at all."""

    def kernel(own: Own) -> Floats:
        mean = rolling(own.volume, n, np.mean)
        return np.where(
            mean > 0, np.log1p(_safe_divide(own.volume, mean)) - np.log(2.0), np.where(np.isnan(mean), mean, 0.0)
        )

    return own_bars_feature(f"volume_ratio_{n}", n - 1, kernel, f"ln(1 + volume over its mean of {n} bars) - ln 2")


def body() -> Feature:
    """(close - open) / (high - low), in [-1, 1]; 0 for a bar without range."""
    return own_bars_feature(
        "body", 0, lambda own: _safe_divide(own.close - own.open, own.high - own.low), "close less open over range"
    )


def clock(name: str, period_hours: int, wave: Callable[[Floats], Floats], meaning: str = "") -> Feature:
    """Phase of the bar's open in a day or a week; days start at 00:00 UTC, weeks on Monday."""

    def function(bars: Bars) -> Floats:
        hours = (bars.ts - np.datetime64("1970-01-05", "ms")) / np.timedelta64(1, "h")  # a Monday
        phase = wave(2.0 * np.pi * np.mod(hours, period_hours) / period_hours)
        return np.repeat(phase[:, None], len(bars.symbols), axis=1)

    return Feature(name, 0, function, meaning)


_KINDS: Mapping[str, Callable[[int], Feature]] = {
    "return": log_return,
    "volatility": volatility,
    "volatility_ratio": volatility_ratio,
    "atr": atr,
    "rsi": rsi,
    "zscore": zscore,
    "range_position": range_position,
    "volume_ratio": volume_ratio,
}
_CLOCKS = (
    clock("day_sin", 24, np.sin, "sine of the time of day"),
    clock("day_cos", 24, np.cos, "cosine of the time of day"),
    clock("week_sin", 168, np.sin, "sine of the time of week"),
    clock("week_cos", 168, np.cos, "cosine of the time of week"),
)
CLOCKS = tuple(feature.name for feature in _CLOCKS)
"""Features that depend on the time alone: nobody can move them."""
_FIXED: Mapping[str, Feature] = {feature.name: feature for feature in (body(), *_CLOCKS)}


def feature(name: str) -> Feature:
    """The feature of that name: `return_16`, `rsi_14`, `day_sin`; the number is the window in bars."""
    if name in _FIXED:
        return _FIXED[name]
    match = re.fullmatch(r"([a-z_]+)_([0-9]{1,6})", name)
    least = 1 if match and match[1] in ("return", "atr", "rsi") else 2
    if match is None or match[1] not in _KINDS or int(match[2]) < least:
        known = [*(f"{kind}_16" for kind in _KINDS), *_FIXED]
        raise ConfigError(
            f"There is no feature {name!r}.{did_you_mean(name, known)} Known, with any window: {', '.join(known)}."
        )
    return _KINDS[match[1]](int(match[2]))


DEFAULT_FEATURES = (
    *("return_1", "return_4", "return_16", "return_64", "volatility_16", "volatility_ratio_16", "atr_14", "rsi_14"),
    *("zscore_32", "range_position_32", "volume_ratio_32", "body", "day_sin", "day_cos", "week_sin", "week_cos"),
)
FEATURES = tuple(feature(name) for name in DEFAULT_FEATURES)


class FeatureSet:
    """Several features side by side, in a fixed order."""

    def __init__(self, features: Sequence[Feature | str] = FEATURES) -> None:
        self.features = tuple(feature(item) if isinstance(item, str) else item for item in features)
        if not self.features or len(set(self.names)) != len(self.features):
            raise ConfigError(f"features={list(self.names)}: name at least one feature, each once.")

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the last axis."""
        return tuple(item.name for item in self.features)

    @property
    def look_back(self) -> int:
        """Bars before t that the value at t may use; the first row without NaN, when no symbol starts late."""
        return max(item.look_back for item in self.features)

    def __call__(self, bars: Bars) -> npt.NDArray[np.float32]:
        """(T, A, F) float32; NaN until a symbol has `look_back` bars behind it."""
        out = np.empty((*bars.close.shape, len(self.features)), dtype=np.float32)
        for i, item in enumerate(self.features):
            out[:, :, i] = item(bars)
        return out


class FeatureScaler:
    """Centres and scales features with the moments of the train rows, then clips; NaN becomes 0, the train mean."""

    def __init__(self, clip: float = 5.0, min_std: float = 1e-9) -> None:
        self.clip, self.min_std = clip, min_std  # configuration
        self.mean: list[float] = []  # state, one entry per feature
        self.std: list[float] = []

    def fit(self, values: npt.NDArray[np.floating], train: slice) -> None:
        """values (T, A, F); only the rows of `train` are looked at, NaN are left out."""
        flat = np.asarray(values[train], dtype=np.float64).reshape(-1, values.shape[-1])
        seen = np.isfinite(flat)
        count = seen.sum(axis=0)
        if not count.all():
            empty = int(np.flatnonzero(count == 0)[0])
            raise DataError(
                f"Feature {empty} has no value in the {flat.shape[0]} train rows: they are shorter than its look-back. "
                f"Use a longer train span or shorter windows."
            )
        mean = np.where(seen, flat, 0.0).sum(axis=0) / count
        var = np.where(seen, np.square(flat - mean), 0.0).sum(axis=0) / count
        self.mean, self.std = mean.tolist(), np.sqrt(var).tolist()

    def __call__(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """(..., F) -> (..., F) float32 within [-clip, clip]; a feature that was constant in train is 0."""
        if values.shape[-1] != len(self.mean):
            raise DataError(
                f"The scaler knows {len(self.mean)} features, the values have {values.shape[-1]}. Call fit first."
            )
        std = np.asarray(self.std)
        scale = np.where(std > self.min_std, 1.0 / np.maximum(std, self.min_std), 0.0)
        z = (values - np.asarray(self.mean)) * scale
        return np.clip(np.where(np.isfinite(z), z, 0.0), -self.clip, self.clip).astype(np.float32)

    def state_dict(self) -> dict[str, list[float]]:
        return {"mean": list(self.mean), "std": list(self.std)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        require_keys(self, state)
        mean, std = [float(x) for x in state["mean"]], [float(x) for x in state["std"]]
        if len(mean) != len(std) or (self.mean and len(mean) != len(self.mean)):
            raise StateError(
                f"FeatureScaler cannot load {len(mean)} means and {len(std)} deviations into {len(self.mean)} features."
            )
        self.mean, self.std = mean, std


def _shifted_difference(values: Floats, n: int) -> Floats:
    out = np.full(len(values), np.nan)
    out[n:] = values[n:] - values[: len(values) - n]
    return out


def _one_bar_moves(own: Own) -> Floats:
    """One-bar log returns; the first, unknown one is 0 and always inside the blanked look-back."""
    return np.nan_to_num(_shifted_difference(np.log(own.close), 1))


def _volatility(own: Own, n: int) -> Floats:
    return rolling(_one_bar_moves(own), n, _deviation)


def _deviation(windows: Floats, axis: int) -> Floats:
    """Standard deviation that is exactly 0 for a constant window, where rounding of the mean would leave dust."""
    out: Floats = np.std(windows, axis=axis)
    return np.where(np.ptp(windows, axis=axis) > 0, out, 0.0)


def _safe_divide(top: Floats, bottom: Floats) -> Floats:
    """top / bottom, 0 where bottom is 0; NaN of the warm-up passes through."""
    return np.divide(top, bottom, out=np.where(np.isnan(top + bottom), np.nan, 0.0), where=bottom > 0)


def _log_ratio(top: Floats, bottom: Floats) -> Floats:
    both = (top > 0) & (bottom > 0)
    ratio = np.divide(top, bottom, out=np.ones_like(top), where=both)
    return np.where(np.isnan(top + bottom), np.nan, np.log(ratio))
