"""Packed and encoded text files: how large they are when unpacked, found before anything is unpacked into memory, and
the bytes of those that polars does not unpack itself."""

from __future__ import annotations

import codecs
import gzip
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from tailguard.errors import DataError
from tailguard.files import open_regular, physical_memory

LARGEST_RATIO = 200
"""Unpacked bytes per byte: bars of one price all day give about 100, a file made to fill memory 1,000 and more."""
ALWAYS_FINE = 2**26
PART = 2**20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
ZIP = b"PK\x03\x04"
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MEMORY_OF_UTF16 = 5
"""Bytes, text of up to four bytes a character and UTF-8, for every byte."""
ZSTD_BLOCK = 2**17
"""Bytes that one block of zstd unpacks to, at most."""


def refuse_bomb(path: Path) -> int:
    """The bytes a text file unpacks to; refused when these are out of proportion or more than memory holds.

    What a file is packed with is told by its first bytes, as the reader tells it, and not by its name.
    """
    with open_regular(path, DataError) as file:
        packed = file.seek(0, 2)
        file.seek(0)
        limit = min(max(LARGEST_RATIO * packed, ALWAYS_FINE), max(physical_memory(), ALWAYS_FINE))
        start = file.read(4)
        file.seek(0)
        if start == ZIP:
            size = _member(file, path).file_size
        elif start[:2] == GZIP or start[:2] in ZLIB:
            size = inflated(file, limit)
        elif start == ZSTD:
            size = zstd_bound(file, packed)
        else:
            size, limit = packed, physical_memory()
    if size > limit:
        more = (
            "more than the memory of this machine" if limit == physical_memory() else f"over {LARGEST_RATIO} times it"
        )
        raise DataError(
            f"{path} has {packed:,} bytes and unpacks to {limit:,} or more, {more}. No file of bars is like that: "
            "split it, or write it anew from its source."
        )
    return size


def unpacked_bytes(path: Path, memory_per_byte: int = 1) -> bytes:
    """The bytes of a file, unpacked where it is gzip or a zip with one file in it; `refuse_bomb` bounds them.

    memory_per_byte: of what is made of them; more than memory holds is refused before anything is read
    """
    size = refuse_bomb(path)
    if size * memory_per_byte > physical_memory():
        raise DataError(
            f"{path} holds {size:,} bytes of text, more than the memory of this machine takes in this format. "
            "Split it, or write it as CSV in UTF-8."
        )
    with open_regular(path, DataError) as file:
        start = file.read(4)
        file.seek(0)
        try:
            if start == ZIP:
                with zipfile.ZipFile(file) as folder, folder.open(_member(file, path)) as inside:
                    return inside.read(size + 1)
            return gzip.GzipFile(fileobj=file).read(size + 1) if start[:2] == GZIP else file.read()
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise DataError(f"{path} cannot be unpacked: {error}. Download it again, or unpack it by hand.") from None


def decoded_text(path: Path) -> bytes | None:
    """UTF-8 text of a zip or of a file in UTF-16; None for a file that polars reads as it is."""
    with open_regular(path, DataError) as file:
        start = file.read(4)
    if start != ZIP and start[:2] not in UTF16:
        return None
    text = unpacked_bytes(path, MEMORY_OF_UTF16)
    if text[:2] not in UTF16:
        return text
    try:
        return text.decode("utf-16").encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not valid UTF-16 text (byte {error.start}). Save it as UTF-8.") from None


def _member(file: BinaryIO, path: Path) -> zipfile.ZipInfo:
    """The only file in a zip."""
    try:
        members = [item for item in zipfile.ZipFile(file).infolist() if not item.is_dir()]
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise DataError(f"{path} is a damaged zip: {error}. Download it again.") from None
    members = [item for item in members if not item.filename.startswith("__MACOSX/")]
    if len(members) != 1:
        raise DataError(f"{path} holds {len(members)} files; one is read from a zip. Unpack it and pass each of them.")
    return members[0]


def inflated(file: BinaryIO, limit: int) -> int:
    """Bytes that gzip or zlib data unpacks to, counted up to a little over `limit` and kept nowhere."""
    total, unpacker = 0, zlib.decompressobj(wbits=47)
    rest = file.read(PART)
    while rest and total <= limit:
        try:
            total += len(unpacker.decompress(rest, PART))
        except zlib.error:
            return total  # damaged from here on: the reader says so
        rest = unpacker.unconsumed_tail or unpacker.unused_data or file.read(PART)
        if unpacker.eof:
            unpacker = zlib.decompressobj(wbits=47)  # several parts may follow each other
    return total


def zstd_bound(file: BinaryIO, packed: int) -> int:
    """The most that zstd data can unpack to, from the headers of its blocks alone; 0 for what cannot be read."""
    total = 0
    while file.tell() < packed:
        magic = file.read(4)
        if magic[1:] == b"\x2a\x4d\x18" and magic[0] & 0xF0 == 0x50:  # a frame to be skipped
            file.seek(int.from_bytes(file.read(4), "little"), 1)
            continue
        if magic != ZSTD:
            break
        descriptor = (file.read(1) or b"\0")[0]
        single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
        size_of_size = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
        file.seek((0 if single else 1) + (0, 1, 2, 4)[descriptor & 3] + size_of_size, 1)
        last = 0
        while not last:
            header = file.read(3)
            if len(header) < 3:
                return total
            value = int.from_bytes(header, "little")
            last, kind, size = value & 1, value >> 1 & 3, value >> 3
            total += size if kind < 2 else ZSTD_BLOCK
            file.seek(1 if kind == 1 else size, 1)
        file.seek(4 * checksum, 1)
    return total
