"""Clocks: what the stamps of a file say about order, gaps, time zone, daylight saving, and open or close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import polars as pl

from tailguard.market.findings import Finding, finding
from tailguard.market.scan import MAX_GAPS, SYMBOL_BITS, Facts, Gap
from tailguard.market.sources import Stamp
from tailguard.market.stamps import DAY_MS, HOUR_MS, StampReading, clock_changes, show, to_utc

_MINUTE_MS = 60_000
_ZONES = (
    "UTC",
    "America/New_York",
    "Europe/London",
    "Europe/Berlin",
    "America/Chicago",
    "Europe/Athens",
    "Australia/Sydney",
)
_FIXED = ("Etc/GMT+5", "Etc/GMT-2")  # New York's winter time all year; the time of many brokers
# When markets open, by the clock of New York: the currency week on Sunday evening, shares on weekday mornings.
_OPENINGS = (("the currency week", (6,), 17 * 60), ("the share market", (0, 1, 2, 3, 4), 9 * 60 + 30))


def clock_findings(
    facts: Facts, naive: bool, tz: str | None, stamp: Stamp | None, named_close: bool, reading: StampReading
) -> Iterable[Finding]:
    """Everything the order and distance of stamps show."""
    if facts.step is None:
        return
    local = [*_daylight_saving(facts, naive)]
    yield from _order(facts, local, reading)
    yield from local
    yield from _zone(facts, naive, tz)
    yield from _gap_findings(facts)
    if stamp is None:
        yield from _close_stamps(facts, facts.step, named_close)


def _order(facts: Facts, local: list[Finding], reading: StampReading) -> Iterable[Finding]:
    if facts.backward and facts.backward > facts.forward:
        yield finding("newest_first", 0, f"{show(facts.span[1] if facts.span else None)} comes first", facts.backward)
    if facts.back_steps and not any(item.code == "dst_repeated_hour" for item in local):
        first = facts.back_steps[0]
        as_text = facts.text_sorted and reading.how == "text"
        value = f"{show(first.after)} after {show(first.before)}"
        yield finding("sorted_as_text" if as_text else "unsorted", first.row, value, len(facts.back_steps))
    yield from _duplicates(facts)


def _duplicates(facts: Facts) -> Iterable[Finding]:
    """Neighbours that repeat a stamp, and, in a file out of order, repeats far apart."""
    if facts.repeats:
        first = facts.repeats[0]
        yield finding("duplicate", first.row, show(first.after), len(facts.repeats))
    elif facts.back_steps and facts.stamps:
        keys = np.concatenate(facts.stamps)
        keys.sort()
        again = keys[1:][keys[1:] == keys[:-1]]
        if len(again):
            yield finding(
                "duplicate", _second_row(facts, int(again[0])), show(int(again[0]) >> SYMBOL_BITS), len(again)
            )


def _second_row(facts: Facts, key: int) -> int:
    rows, start = [], 0
    for part in facts.stamps:
        rows += (np.flatnonzero(part == key) + start).tolist()
        start += len(part)
    return int(rows[1])


def _daylight_saving(facts: Facts, naive: bool) -> Iterable[Finding]:
    """The missing hour of spring and the repeated hour of autumn, where a known zone changes its clocks."""
    if not naive or facts.span is None or facts.step is None or facts.step >= DAY_MS:
        return
    for zone in _ZONES:
        changes = clock_changes(zone, facts.span[0] - DAY_MS, facts.span[1] + DAY_MS)
        skipped = {_wall(at, zone) - change for at, change in changes if change > 0}  # wall time that does not exist
        repeated = {_wall(at, zone) for at, change in changes if change < 0}  # wall time that starts again
        missing = [gap for gap in facts.gaps if gap.before + facts.step in skipped and _is_one_hour(gap, facts.step)]
        twice = [gap for gap in (*facts.back_steps, *facts.repeats) if gap.after in repeated]
        if missing:
            yield finding(
                "dst_missing_hour",
                missing[0].row,
                f"{show(missing[0].before + facts.step)}, as in {zone}",
                len(missing),
            )
        if twice:
            yield finding("dst_repeated_hour", twice[0].row, f"{show(twice[0].after)}, as in {zone}", len(twice))
        if missing or twice:
            return


def _is_one_hour(gap: Gap, step: int) -> bool:
    return gap.after - gap.before == step + HOUR_MS


def _wall(utc_ms: int, zone: str) -> int:
    there = pl.Series([utc_ms]).cast(pl.Datetime("ms", "UTC")).dt.convert_time_zone(zone)
    return int(there.dt.replace_time_zone(None).dt.epoch("ms").item())


def _zone(facts: Facts, naive: bool, tz: str | None) -> Iterable[Finding]:
    """Naive stamps, with the zone that trading hours point to; and clock changes inside the file."""
    market, zones = _zones_of_sessions(facts, [*_ZONES, *_FIXED] if naive else ["UTC"])
    if naive:
        hint = f"The open of {market} fits {' or '.join(zones)}: pass tz={zones[0]!r}." if zones else None
        yield finding("naive", 0, show(facts.span[0] if facts.span else None), facts.rows, hint)
    elif not zones and tz in (None, "UTC"):
        yield from _mislabelled(facts)
    local = tz if tz is not None else (zones[0] if naive and zones else None)
    if facts.span is None or (local is None and not zones):
        return
    changes = clock_changes(local or "America/New_York", *facts.span)
    if changes and local is None:
        yield finding("dst_sessions", None, f"{market} opens by the clock of New York, which changes {_dates(changes)}")
    elif changes and naive:
        yield finding("dst_switch", None, f"{local} changes its clocks {_dates(changes)}")
    elif changes:
        yield finding("dst_sessions", None, f"{local} changes its clocks {_dates(changes)}; converted by its rules")


def _mislabelled(facts: Facts) -> Iterable[Finding]:
    """Stamps called UTC whose sessions open on time only if they are read as local time."""
    market, zones = _zones_of_sessions(facts, [zone for zone in (*_ZONES, *_FIXED) if zone != "UTC"])
    if zones:
        value = f"{market} opens on time when stamps are read as {' or '.join(zones)}"
        yield finding("zone_doubt", 0, value, facts.rows)


def _dates(changes: list[tuple[int, int]]) -> str:
    shown = ", ".join(show(at)[:10] for at, _ in changes[:4])
    return f"on {shown}" + (f" and {len(changes) - 4} times more" if len(changes) > 4 else "")


def _zones_of_sessions(facts: Facts, zones: list[str]) -> tuple[str, list[str]]:
    """A market, and those of the zones in which this file's sessions open when that market does."""
    if facts.step is None or facts.step >= DAY_MS:
        return "", []
    for market, weekdays, minute in _OPENINGS:
        least = 24 * HOUR_MS if len(weekdays) == 1 else 12 * HOUR_MS
        opens = pl.Series([gap.after for gap in facts.gaps if gap.after - gap.before > least], dtype=pl.Int64)
        if len(opens) < 3:
            continue
        fits = [zone for zone in zones if _share_at(opens, zone, weekdays, minute, facts.step) >= 0.8]
        if fits:
            return market, fits
    return "", []


def _share_at(opens: pl.Series, zone: str, weekdays: tuple[int, ...], minute: int, step: int) -> float:
    """Share of sessions that open on those weekdays at that minute in New York, give or take a bar or five minutes."""
    there = to_utc(opens, zone, "earliest").cast(pl.Datetime("ms", "UTC")).dt.convert_time_zone("America/New_York")
    late = (there.dt.hour().cast(pl.Int64) * 60 + there.dt.minute()) - minute
    width = max(5, step // _MINUTE_MS - 1)
    return float((((late >= 0) & (late <= width)) & (there.dt.weekday() - 1).is_in(list(weekdays))).sum() / len(opens))


def _gap_findings(facts: Facts) -> Iterable[Finding]:
    if facts.step is None:
        return
    step = facts.step
    gaps = [gap for gap in facts.gaps if gap.after - gap.before > step]
    lengths = Counter(gap.after - gap.before for gap in gaps)
    closed: list[Gap] = []
    inside: list[Gap] = []
    for gap in gaps:
        (closed if _recurs(gap, lengths, step, len(facts.symbols)) else inside).append(gap)
    for code, part in (("closed_hours", closed), ("gap", inside)):
        if part:
            missing = sum(max(1, round((gap.after - gap.before) / step) - 1) for gap in part)
            longest = max(part, key=lambda gap: gap.after - gap.before)
            least = "at least " if len(facts.gaps) >= MAX_GAPS else ""
            value = f"{least}{missing:,} bars missing; the longest from {show(longest.before)} to {show(longest.after)}"
            yield finding(code, longest.row, value, len(part))
    shorter = {size: count for size, count in facts.differences.items() if size < step}
    if shorter and not facts.back_steps:
        size = min(shorter)
        yield finding("off_grid", None, f"{size / 1000:g} s instead of {step / 1000:g} s", sum(shorter.values()))


def _recurs(gap: Gap, lengths: Counter[int], step: int, n_symbols: int) -> bool:
    """Closed hours: a weekend, a holiday of daily bars, or a long gap of a length that comes back again and again."""
    size = gap.after - gap.before
    if step >= DAY_MS and size <= 5 * step:
        return True
    middle = (gap.before + gap.after) // 2
    weekend = any((day + 3) % 7 >= 5 for day in range(gap.before // DAY_MS, middle // DAY_MS + 2))
    if weekend and size >= 24 * HOUR_MS:
        return True
    return size >= 4 * HOUR_MS and lengths[size] >= 5 * n_symbols


def _close_stamps(facts: Facts, step: int, named_close: bool) -> Iterable[Finding]:
    """Evidence that a stamp is the end of its bar, from the strongest kind to the weakest."""
    if named_close:
        yield finding("close_stamps", 0, "the name of the stamp column says so", facts.rows)
    elif step >= _MINUTE_MS and facts.tails and set(facts.tails) <= {59_999, 59_000, 59_900}:
        yield finding("close_stamps", 0, f"stamps end in {min(facts.tails) / 1000:g} seconds", facts.rows)
    elif evidence := _session_evidence(facts, step) or _activity_evidence(facts, step):
        yield finding("close_stamps", 0, evidence, facts.rows)
    elif facts.span is not None and step < DAY_MS:
        first, last = facts.span
        if (first - step) % DAY_MS == 0 and last % DAY_MS == 0:
            yield finding("maybe_close_stamps", 0, f"from {show(first)} to {show(last)}")


def _session_evidence(facts: Facts, step: int) -> str:
    """Sessions open and close on the half hour: the first bar stamped one step later is stamped at its close."""
    half = HOUR_MS // 2
    nights = [gap for gap in facts.gaps if gap.after - gap.before >= 4 * HOUR_MS]
    if len(nights) < 3 or half % step or step == half:
        return ""
    late = [gap for gap in nights if (gap.after - step) % half == 0 and gap.before % half == 0]
    if len(late) < 0.8 * len(nights):
        return ""
    example = show(late[0].after)
    return f"{len(late)} of {len(nights)} sessions start one bar after the half hour and end on it, as at {example}"


def _activity_evidence(facts: Facts, step: int) -> str:
    """Trading is busiest right after the quarter hour; stamped at the close, that bar is stamped one step later."""
    minutes = step // _MINUTE_MS
    if step % _MINUTE_MS or minutes not in (1, 3, 5):
        return ""
    at, after = facts.activity[:, [0, 15, 30, 45]], facts.activity[:, [(m + minutes) % 60 for m in (0, 15, 30, 45)]]
    if min(at[0].min(), after[0].min()) < 30:
        return ""
    means, errors = [], []
    for count, total, squares in (at.sum(axis=1), after.sum(axis=1)):
        mean = total / count
        means.append(mean)
        errors.append(max(squares / count - mean**2, 0.0) / count)
    z = (means[1] - means[0]) / max(np.sqrt(sum(errors)), 1e-300)
    if z < 4:
        return ""
    wider = means[1] / means[0] - 1
    return f"bars one step after the quarter hour are {wider:.0%} wider than those at it ({z:.0f} standard errors)"


def calendar_view(facts: Facts, weeks: int = 53) -> str:
    """Where bars are missing: day by day for up to a year, month by month beyond that."""
    if not facts.days or facts.step is None or not any(gap.after - gap.before > facts.step for gap in facts.gaps):
        return ""
    first, last = min(facts.days), max(facts.days)
    if last - first <= 7 * weeks:
        usual = Counter(facts.days.values()).most_common(1)[0][0]
        title = f"Bars per day against the usual {usual:,}: # all, + most, - some, . none"
        return "\n".join([title, *_days(facts, first, last, usual)])
    title = "Bars per month, in tenths of the fullest month: 9 for 90 % and more, . for none"
    return "\n".join([title, *_months(facts)])


def _days(facts: Facts, first: int, last: int, usual: int) -> list[str]:
    monday = first - (first + 3) % 7  # day 0 of 1970 was a Thursday
    lines = []
    for weekday, name in enumerate(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")):
        days = range(monday + weekday, last + 1, 7)
        lines.append(f"{name} " + "".join(_mark(facts.days[day], usual) if day >= first else " " for day in days))
    starts = [f"{show(day * DAY_MS)[:10]}" for day in (first, last)]
    return [*lines, f"    weeks from {starts[0]} to {starts[1]}"]


def _mark(count: int, usual: int) -> str:
    share = count / usual
    return "#" if share >= 0.999 else "+" if share >= 0.5 else "-" if share > 0 else "."


def _months(facts: Facts) -> list[str]:
    """Rows per month over its length in days, against the fullest month."""
    rows: Counter[int] = Counter()  # months since 1970
    for day, count in facts.days.items():
        rows[int(np.datetime64(day, "D").astype("datetime64[M]").astype(int))] += count
    share = {month: count / _length(month) for month, count in rows.items()}
    fullest = max(share.values())
    lines = ["     JFMAMJJASOND"]
    for year in range(min(rows) // 12, max(rows) // 12 + 1):
        cells = [share.get(12 * year + month, 0.0) / fullest for month in range(12)]
        lines.append(f"{1970 + year} " + "".join("." if cell == 0 else str(min(9, int(cell * 10))) for cell in cells))
    return lines


def _length(month: int) -> int:
    start = np.datetime64(month, "M")
    return int(((start + 1).astype("datetime64[D]") - start.astype("datetime64[D]")).astype(int))
