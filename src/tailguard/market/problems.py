"""What a data check can find, declared in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Problem:
    """A kind of finding: what it means for training and what to do."""

    severity: Severity
    meaning: str
    fix: str


PROBLEMS: dict[str, Problem] = {
    # the file
    "empty": Problem(
        "error",
        "There is no row.",
        "Export the data again.",
    ),
    "one_row": Problem(
        "error",
        "One bar says neither how long a bar is nor how prices move.",
        "Load at least two bars.",
    ),
    "unreadable": Problem(
        "error",
        "A part of the file cannot be read.",
        "Export the file again, or drop the damaged lines.",
    ),
    "no_header": Problem(
        "error",
        "The first line is data, so columns have no names; the usual order is assumed here.",
        "Pass columns=[...] in the order of the file.",
    ),
    "wrong_dtype": Problem(
        "error",
        "A price or volume column does not hold numbers.",
        "Store the column as float64 or int64.",
    ),
    "not_a_number": Problem(
        "error",
        "A cell that must be a number is not.",
        "Write plain numbers with a decimal point, or drop the row.",
    ),
    "missing_symbol": Problem(
        "error",
        "A row does not say which symbol it belongs to.",
        "Complete the symbol or drop the row.",
    ),
    # stamps
    "bad_stamp": Problem(
        "error",
        "The stamp is missing or not written like the others.",
        "Correct or drop the row.",
    ),
    "day_or_month": Problem(
        "error",
        "Dates read as day/month and as month/day alike.",
        "Write dates as YYYY-MM-DD.",
    ),
    "mixed_units": Problem(
        "error",
        "Unix stamps change their unit inside the file.",
        "Write all of them in milliseconds.",
    ),
    "naive": Problem(
        "error",
        "Stamps do not say their time zone, so the instant of every bar is unknown.",
        "Pass tz='UTC' or the zone of the exchange, such as tz='America/New_York'.",
    ),
    "zone_doubt": Problem(
        "warning",
        "Stamps say UTC, but trading hours say local time: a zone may have been put on without conversion.",
        "Compare one bar with another source; load the stamps without their zone and pass the right tz=.",
    ),
    "mixed_zone": Problem(
        "error",
        "Some stamps have a zone and some do not.",
        "Write every stamp with its offset.",
    ),
    "several_offsets": Problem(
        "warning",
        "Stamps carry different offsets. Each is read exactly.",
        "Make sure that the change of offset is meant; UTC is safer.",
    ),
    "newest_first": Problem(
        "error",
        "Rows run from new to old, so every window would look into the future.",
        "Pass repair=['sort'] to load_bars, or sort the file by stamp.",
    ),
    "sorted_as_text": Problem(
        "error",
        "Rows are in the order of the dates as text, not in time.",
        "Write dates as YYYY-MM-DD and sort again, or pass repair=['sort'].",
    ),
    "unsorted": Problem(
        "error",
        "A row is earlier than the row before it.",
        "Sort by stamp, or pass repair=['sort'] to load_bars.",
    ),
    "duplicate": Problem(
        "error",
        "Two rows of one symbol share a stamp.",
        "Find out which is right and drop the other, or pass repair=['duplicates'] to keep the last.",
    ),
    "close_stamps": Problem(
        "error",
        "Stamps look like the close of each bar. Read as opens they put every bar one step too late, out of line "
        "with other data.",
        "Pass stamp='close' to shift by one bar, or stamp='open' if they are opens after all.",
    ),
    "maybe_close_stamps": Problem(
        "warning",
        "The first and last stamps hint at the close of bars, not at the open.",
        "Ask the source; pass stamp='close' or stamp='open' to settle it.",
    ),
    "dst_missing_hour": Problem(
        "error",
        "An hour is missing where local clocks go forward, so stamps are local time.",
        "Pass that zone as tz=, or export in UTC.",
    ),
    "dst_repeated_hour": Problem(
        "error",
        "An hour occurs twice where local clocks go back, so stamps are local time.",
        "Export in UTC, or pass tz= and ambiguous=.",
    ),
    "dst_impossible": Problem(
        "error",
        "In the zone given, this wall-clock time does not exist or occurs twice.",
        "Correct tz=, pass ambiguous=, or export in UTC.",
    ),
    "dst_switch": Problem(
        "warning",
        "Local clocks change inside the file. One fixed offset would put all later rows one hour off.",
        "Use the zone's name as tz=, not an offset.",
    ),
    "dst_sessions": Problem(
        "note",
        "Trading hours follow local clocks, so in UTC they move by an hour twice a year.",
        "Nothing to correct; time-of-day features see the move.",
    ),
    # gaps
    "closed_hours": Problem(
        "note",
        "Bars are missing at recurring times: nights, weekends, holidays.",
        "Nothing to correct; bars_per_year counts what is there.",
    ),
    "gap": Problem(
        "warning",
        "Bars are missing inside trading hours. They stay missing rows; no price is filled in.",
        "Fetch the span again if the market was open.",
    ),
    "off_grid": Problem(
        "warning",
        "Bars are closer together than the usual step.",
        "Check that the file holds one bar length only.",
    ),
    # prices
    "missing_price": Problem(
        "error",
        "A price is empty or not a number.",
        "A missing bar is a missing row: drop it, or pass repair=['missing'].",
    ),
    "non_positive_price": Problem(
        "error",
        "A price is zero or negative, so its log return does not exist.",
        "Drop the row or correct the price.",
    ),
    "high_below_low": Problem(
        "error",
        "high is below low.",
        "The columns may be in another order: pass columns=.",
    ),
    "open_outside": Problem(
        "error",
        "open is outside [low, high].",
        "Correct the row; the columns may be in another order.",
    ),
    "close_outside": Problem(
        "error",
        "close is outside [low, high].",
        "Correct the row; the columns may be in another order.",
    ),
    "unit_jump": Problem(
        "error",
        "The price jumps between two bars by a round factor: a split, or another unit or contract.",
        "Use adjusted prices, or split the file there; accept=['unit_jump'] if the move was real.",
    ),
    "large_move": Problem(
        "warning",
        "The price rises by more than 65 % or falls by more than 39 % in one bar.",
        "Look at the row: a bad tick teaches the agent more than a thousand good ones.",
    ),
    "flat": Problem(
        "warning",
        "The price does not move at all for a long stretch: a halt, or a feed that repeats its last value.",
        "Drop the stretch if nothing was traded: a missing bar is a missing row.",
    ),
    # volume
    "missing_volume": Problem(
        "error",
        "Volume is empty or not a number.",
        "Write 0 where volume is not known, or pass repair=['missing_volume'].",
    ),
    "negative_volume": Problem(
        "error",
        "Volume is negative.",
        "Write its absolute value if the sign marks the side, else drop the row.",
    ),
    "swapped_volume": Problem(
        "error",
        "Base and quote volume are exchanged: volume over quote volume is the price.",
        "Pass repair=['swapped_volume'] to load_bars.",
    ),
    "volume_jump": Problem(
        "warning",
        "The level of volume changes abruptly by more than 1,000 times: base and quote volume may be mixed.",
        "Compare both sides of the row with another source.",
    ),
    "no_volume": Problem(
        "note",
        "Volume is zero everywhere or there is none.",
        "Nothing to correct; volume features say nothing and impact cannot be modelled.",
    ),
}
