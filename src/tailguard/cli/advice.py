"""Advice of the Python API in the words of the command line, so that it works when it is followed to the letter."""

from __future__ import annotations

import re
import shlex

OPTIONS = ("tz", "stamp", "symbol", "ambiguous", "repair", "columns", "accept")


def on_command_line(text: str) -> str:
    """`repair=['sort']` as `--repair sort`, `columns={'close': 'last'}` as `--columns close=last`, and so on."""
    text = re.sub(r"load_bars\(\.\.\., (.*?=.*?)\)", r"\1", text).replace(" to load_bars", "")
    text = re.sub(r"columns=\{'(\w+)': (?:\.\.\.|'(.*?)'|\"(.*?)\")\}", _one_column, text)
    text = re.sub(r"columns=\[('.*?')\]", _all_columns, text)
    text = text.replace("columns=[...]", "--columns NAME,NAME,...")
    text = re.sub(r"(repair|accept)=\['(\w+)'\]", r"--\1 \2", text)
    text = re.sub(r"(tz|stamp|symbol|ambiguous)='([^']*)'", lambda found: f"--{found[1]} {shlex.quote(found[2])}", text)
    return re.sub(rf"(?<![\w.-])({'|'.join(OPTIONS)})=(?=[\s,;.]|$)", r"--\1", text)


def _one_column(found: re.Match[str]) -> str:
    return "--columns " + shlex.quote(f"{found[1]}={found[2] or found[3] or 'NAME'}")


def _all_columns(found: re.Match[str]) -> str:
    return "--columns " + shlex.quote(",".join(re.findall("'(.*?)'", found[1])))
