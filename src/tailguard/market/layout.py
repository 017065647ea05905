"""Layout: which column of a source plays which role, guessed from its names and said aloud."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import polars as pl

from tailguard.errors import DataError, did_you_mean

ROLES = ("ts", "symbol", "open", "high", "low", "close", "volume", "quote_volume", "adj_close")
REQUIRED = ("ts", "open", "high", "low", "close")
PRICES = ("open", "high", "low", "close")
ONLY_CLOSES = (
    "only closes: open, high and low are set to the close, so an order is filled a whole bar later, at the next close; "
    "what happens within a bar is not known, and features of ranges say nothing"
)
USUAL_ORDER = ("ts", "open", "high", "low", "close", "volume")

_OPEN_STAMPS = ("ts", "opentime", "unix", "unixtime", "unixtimestamp", "timestamp", "datetime", "gmttime", "localtime")
_UNNAMED = "unnamed0"
"""What pandas calls the index that it wrote without a name."""
_STAMPS = (
    *(*_OPEN_STAMPS, "date", "day", "observationdate", "time", "t", "index", "closetime", "dateclose"),
    _UNNAMED,
)
_TICK_VOLUMES = ("tickvolume", "tickvol", "ticks")
_NAMES: dict[str, tuple[str, ...]] = {
    "ts": _STAMPS,  # in order of preference: a stamp that names its zone before one that may not
    "symbol": ("symbol", "ticker", "tic", "pair", "instrument", "market", "code"),
    "open": ("open", "o", "openprice", "priceopen"),
    "high": ("high", "h", "highprice", "pricehigh", "max"),
    "low": ("low", "l", "lowprice", "pricelow", "min"),
    "close": ("close", "c", "closeprice", "priceclose", "closelast", "last", "price"),
    "volume": ("volume", "vol", "v", "basevolume", "volumebase", *_TICK_VOLUMES),
    "quote_volume": ("quotevolume", "volumequote", "quoteassetvolume", "quoteav", "turnover", "volumenotional"),
    "adj_close": ("adjclose", "adjustedclose", "adjusted", "closeadj", "adjcloseprice"),
}
_QUOTE_CURRENCIES = ("usd", "usdt", "usdc", "busd", "eur", "gbp", "jpy", "krw", "chf", "try", "brl")


@dataclass(frozen=True)
class Layout:
    """Source column of each role; `time` is a second column to join to the date."""

    roles: Mapping[str, str]
    time: str | None = None
    stamped_at_close: bool = False
    """The name of the stamp column, not chosen by the user, says that it is the end of the bar."""
    notes: tuple[str, ...] = ()


def guess_layout(names: Sequence[str], columns: Mapping[str, str | int] | None = None) -> Layout:
    """Roles by name, the user's own `columns` first; raises DataError with the names found when one is missing."""
    chosen = _chosen(names, columns or {})
    plain = _plain(names)
    roles = _roles(names, chosen)
    _name_volumes(roles, plain)
    only_closes = _only_closes(roles)
    missing = [role for role in REQUIRED if role not in roles]
    if missing:
        free = [name for name in names if name not in roles.values()] or ["NAME"]
        near = get_close_matches(missing[0], free, n=1, cutoff=0.4) or free
        raise DataError(
            f"No column for {', '.join(missing)} among {list(names)}. "
            f"Say which it is, for example columns={{{missing[0]!r}: {near[0]!r}}}."
        )
    time = None
    if "ts" not in chosen and plain[roles["ts"]] in ("date", "day"):
        time = next((name for name in names if plain[name] == "time"), None)
    said = {role: source for role, source in roles.items() if not only_closes or role not in PRICES[:3]}
    taken = ", ".join(f"{role} <- {source!r}" for role, source in said.items() if role != source)
    notes = [f"columns: {taken}"] if taken else []
    if only_closes:
        notes.append(ONLY_CLOSES)
    if time:
        notes.append(f"stamp: {roles['ts']!r} and {time!r} joined")
    if "volume" not in roles:
        notes.append("no volume column: volume is 0, so volume features say nothing and impact cannot be modelled")
    at_close = "ts" not in chosen and plain[roles["ts"]] in ("closetime", "dateclose")
    return Layout(roles, time, at_close, tuple(notes))


def fitted_layout(frame: pl.DataFrame, columns: Mapping[str, str | int] | None = None) -> Layout:
    """The layout by names, and of two columns of volume the one that holds any: MetaTrader leaves <VOL> at zero."""
    layout = guess_layout(frame.columns, columns)
    volume = layout.roles.get("volume")
    if volume is None or "volume" in (columns or {}) or _holds_any(frame[volume]):
        return layout
    plain = _plain(frame.columns)
    ticks = [name for name in frame.columns if plain[name] in _TICK_VOLUMES and _holds_any(frame[name])]
    if ticks:
        note = f"volume <- {ticks[0]!r}, because {volume!r} holds none"
        return replace(layout, roles={**layout.roles, "volume": ticks[0]}, notes=(*layout.notes, note))
    if frame.schema[volume] != pl.String or frame[volume].null_count() < frame.height:
        return layout
    roles = {role: name for role, name in layout.roles.items() if role != "volume"}
    return replace(layout, roles=roles, notes=(*layout.notes, f"{volume!r} is empty: volume is 0"))


def find_stamp(names: Sequence[str]) -> str | None:
    """The column of stamps, by its name."""
    return _roles(names, {}).get("ts")


def price_roles(names: Sequence[str]) -> set[str]:
    """Which of open, high, low and close have a column; a single letter is a ticker unless all four are there."""
    roles = _roles(names, {})
    found = {role for role in PRICES if role in roles}
    return found if len(found) == 4 else {role for role in found if len(roles[role]) > 1}


def columns_of(entries: Sequence[str]) -> list[str] | dict[str, str] | None:
    """Columns as settings and the command line write them: names in the order of the file, or `role=name` pairs."""
    pairs = [entry.partition("=") for entry in entries]
    if entries and all(mark and role.strip() in ROLES for role, mark, _ in pairs):
        return {role.strip(): name for role, _, name in pairs}
    return list(entries) or None


def _plain(names: Sequence[str]) -> dict[str, str]:
    return {name: re.sub(r"[^a-z0-9]", "", name.lower()) if name.strip() else _UNNAMED for name in names}


def _roles(names: Sequence[str], chosen: Mapping[str, str]) -> dict[str, str]:
    plain, roles = _plain(names), dict(chosen)
    for role, known in _NAMES.items():
        if role in roles:
            continue
        matches = [name for key in known for name in names if plain[name] == key and name not in roles.values()]
        if matches:
            roles[role] = matches[0]
    if "close" not in roles and "adj_close" in roles:
        roles["close"] = roles.pop("adj_close")
    return roles


def _only_closes(roles: dict[str, str]) -> bool:
    """Whether close is the only price; open, high and low are then its column too."""
    if "close" not in roles or any(role in roles for role in PRICES[:3]):
        return False
    roles.update(dict.fromkeys(PRICES[:3], roles["close"]))
    return True


def _holds_any(column: pl.Series) -> bool:
    if not (column.dtype.is_numeric() or column.dtype in (pl.String, pl.Null)):
        return True  # the reader says that it holds no numbers
    values = column.cast(pl.Float64, strict=False)
    return bool(((values != 0) | (values.is_null() & column.is_not_null())).fill_null(False).any())


def _chosen(names: Sequence[str], columns: Mapping[str, str | int]) -> dict[str, str]:
    chosen = {}
    for role, source in columns.items():
        if role not in ROLES:
            raise DataError(f"columns has the role {role!r}.{did_you_mean(role, ROLES)} Roles: {', '.join(ROLES)}.")
        if isinstance(source, int):
            if not 0 <= source < len(names):
                raise DataError(f"columns[{role!r}]={source}, but the source has columns 0 to {len(names) - 1}.")
            source = names[source]
        if source not in names:
            raise DataError(
                f"columns[{role!r}]={source!r} is not in the source.{did_you_mean(source, names)} It has {list(names)}."
            )
        chosen[role] = source
    return chosen


def _name_volumes(roles: dict[str, str], plain: Mapping[str, str]) -> None:
    """'Volume USD' beside 'volume' (or beside 'Volume BTC') is the quote volume."""
    named = {
        name: key.removeprefix("volume") for name, key in plain.items() if key.startswith("volume") and key != "volume"
    }
    free = {name: unit for name, unit in named.items() if name not in roles.values()}
    quotes = [name for name, unit in free.items() if unit in _QUOTE_CURRENCIES]
    bases = [name for name, unit in free.items() if unit not in _QUOTE_CURRENCIES]
    if "volume" not in roles and bases:
        roles["volume"] = bases[0]
    if "quote_volume" not in roles and quotes:
        roles["quote_volume"] = quotes[0]
