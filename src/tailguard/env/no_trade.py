"""No-trade windows: times of the day or of the week at which an account sends no orders."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator

from tailguard.errors import ConfigError

DAY = 1_440  # minutes
WEEK = 7 * DAY
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MOMENT = re.compile(r"(?:(mon|tue|wed|thu|fri|sat|sun) )?([01]\d|2[0-4]):([0-5]\d)", re.IGNORECASE)


def minutes_of(window: str) -> tuple[int, int, int]:
    """(first minute, minute after the last, minutes of the period) of "21:55-22:10" (a day) or "Fri 20:00-Sun 23:00"
    (a week from Monday); the end may lie before the start, across midnight or the week's end."""
    ends = [_MOMENT.fullmatch(part.strip()) for part in window.split("-")]
    moments = [found.groups() for found in ends if found is not None]
    named = {day is not None for day, _, _ in moments}
    minutes = [
        (WEEKDAYS.index(day.lower()) * DAY if day else 0) + 60 * int(hour) + int(minute)
        for day, hour, minute in moments
    ]
    day_over = any(int(hour) == 24 and int(minute) > 0 for _, hour, minute in moments)
    if len(ends) != 2 or len(moments) != 2 or len(named) != 1 or day_over or minutes[0] == minutes[1]:
        raise ConfigError(
            f'no_trade_windows: {window!r} is not a time window. Write "21:55-22:10" for every day or '
            '"Fri 20:00-Sun 23:00" for every week, both in UTC; the end is not part of it.'
        )
    return minutes[0], minutes[1], WEEK if named == {True} else DAY


def checked(window: str) -> str:
    """The window as it was written."""
    minutes_of(window)
    return window


NoTradeWindow = Annotated[str, AfterValidator(checked)]


def inside(ts: npt.NDArray[np.datetime64], windows: Iterable[str]) -> npt.NDArray[np.bool_]:
    """(T,) whether each UTC stamp of (T,) lies in one of the windows."""
    of_week = (ts.astype("datetime64[m]").astype(np.int64) + 3 * DAY) % WEEK  # 1970 began on a Thursday
    found = np.zeros(len(ts), dtype=np.bool_)
    for window in windows:
        first, stop, period = minutes_of(window)
        found |= (of_week - first) % period < ((stop - first) % period or period)
    return found
