"""What fault injection looks at: how far a population is, who runs, and who listens where."""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Callable
from pathlib import Path


def n_lines(folder: Path) -> int:
    file = folder / "population.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    """Children of all threads of a process, their children, and so on."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = [int(child) for child in file.read_text().split()]
        except OSError:
            continue  # it has just ended
        found += [grandchild for child in own for grandchild in (child, *descendants(child))]
    return found


def listening(pids: list[int]) -> dict[int, set[str]]:
    """Addresses at which processes of this machine take connections, or datagrams, by process."""
    addresses: dict[str, str] = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state = fields[1], fields[3]
            if state == "0A" or name.startswith("udp"):
                addresses[fields[9]] = address_of(local.split(":")[0])
    found = {}
    for pid in pids:
        held = set()
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file))
            except OSError:
                continue
            if inode and inode[1] in addresses:
                held.add(addresses[inode[1]])
        if held:
            found[pid] = held
    return found


def address_of(text: str) -> str:
    """An address as /proc/net writes it: words of four bytes, each in the order of the machine."""
    raw = bytes.fromhex(text)
    packed = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
