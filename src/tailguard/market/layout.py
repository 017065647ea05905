"""Layout: which column of a source plays which role, guessed from its names and said aloud."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailguard.errors import DataError, did_you_mean

ROLES = ("ts", "symbol", "open", "high", "low", "close", "volume", "quote_volume")
REQUIRED = ("ts", "open", "high", "low", "close")
USUAL_ORDER = ("ts", "open", "high", "low", "close", "volume")

_OPEN_STAMPS = ("ts", "opentime", "unix", "unixtime", "unixtimestamp", "timestamp", "datetime", "gmttime", "localtime")
_STAMPS = (*_OPEN_STAMPS, "date", "day", "time", "t", "index", "closetime", "dateclose")
_NAMES: dict[str, tuple[str, ...]] = {
    "ts": _STAMPS,  # in order of preference: a stamp that names its zone before one that may not
    "symbol": ("symbol", "ticker", "tic", "pair", "instrument", "market", "code"),
    "open": ("open", "o", "openprice", "priceopen"),
    "high": ("high", "h", "highprice", "pricehigh", "max"),
    "low": ("low", "l", "lowprice", "pricelow", "min"),
    "close": ("close", "c", "closeprice", "priceclose", "last"),
    "volume": ("volume", "vol", "v", "basevolume", "volumebase", "tickvolume", "tickvol"),
    "quote_volume": ("quotevolume", "volumequote", "quoteassetvolume", "quoteav", "turnover", "volumenotional"),
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
    plain = {name: re.sub(r"[^a-z0-9]", "", name.lower()) for name in names}
    roles = dict(chosen)
    for role, known in _NAMES.items():
        if role in roles:
            continue
        matches = [name for key in known for name in names if plain[name] == key and name not in roles.values()]
        if matches:
            roles[role] = matches[0]
    _name_volumes(roles, plain)
    missing = [role for role in REQUIRED if role not in roles]
    if missing:
        raise DataError(
            f"No column for {', '.join(missing)} among {list(names)}. "
            f"Say which it is, for example columns={{{missing[0]!r}: {names[0] if names else 'NAME'!r}}}."
        )
    time = None
    if "ts" not in chosen and plain[roles["ts"]] in ("date", "day"):
        time = next((name for name in names if plain[name] == "time"), None)
    taken = ", ".join(f"{role} <- {source!r}" for role, source in roles.items() if role != source)
    notes = [f"columns: {taken}"] if taken else []
    if time:
        notes.append(f"stamp: {roles['ts']!r} and {time!r} joined")
    if "volume" not in roles:
        notes.append("no volume column: volume is 0, so volume features say nothing and impact cannot be modelled")
    at_close = "ts" not in chosen and plain[roles["ts"]] in ("closetime", "dateclose")
    return Layout(roles, time, at_close, tuple(notes))


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
