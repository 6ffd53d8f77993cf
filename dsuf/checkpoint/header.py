"""The header of a safetensors file: which tensors it holds, and every way in which it can be wrong.

A file is a little-endian u64 length, that many bytes of JSON, and the data. We read the JSON ourselves, since the NumPy
side of the `safetensors` package knows neither BF16 nor the 8-bit floats, and since it stops at the first fault.
"""

import math
import os
import stat
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from dsuf.errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""NumPy types by their safetensors names."""

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8
_MAX_ELEMENTS = 1 << 62  # NumPy counts in signed 64 bits, even for an array with an axis of 0

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file; `start` and `stop` (exclusive) are byte offsets from the beginning of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(msgspec.Struct, frozen=True):
    """What a file says it holds. `data_start` is the byte where data begins; `faults` is empty for a sound file.

    A tensor whose entry cannot be decoded is in `broken` and not in `entries`.
    """

    entries: dict[str, Entry]
    broken: frozenset[str]
    data_start: int
    faults: tuple[str, ...]


class _RawEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_RawEntry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


def read_header(path: Path) -> Header:
    """Read and check the header of `path`.

    Faults that leave the rest readable (an entry, offsets, the file's length) are listed in the result; raises
    `CheckpointError` where there is no header to speak of.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: that would wait for the other end of a pipe
            raise CheckpointError(f"{path.name}: not a regular file")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(f"{path.name}: {_length_fault(len(prefix), length, file_bytes)}")
            return parse_header(file.read(length), file_bytes)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot read: {error.strerror}") from error
    except _BAD_JSON as error:
        raise CheckpointError(f"{path.name}: corrupt header: {_one_line(error)}") from error


def parse_header(text: bytes, file_bytes: int) -> Header:
    """The header whose JSON is `text`, in a file of `file_bytes`; raises msgspec's decoding error if it is not JSON."""
    raw_entries = _decode_names(text)
    faults: list[str] = []
    entries: dict[str, Entry] = {}
    if (metadata := raw_entries.pop("__metadata__", None)) is not None:
        _decode_metadata(metadata)
    for name, raw in raw_entries.items():
        try:
            found = _decode_entry(raw)
        except _BAD_JSON as error:
            faults.append(f"tensor {show(name)}: corrupt header: {_one_line(error)}")
            continue
        entries[name] = Entry(found.dtype, found.shape, *found.data_offsets)
        faults += [f"tensor {show(name)}: {fault}" for fault in _entry_faults(entries[name])]
    data_start = 8 + len(text)
    faults += _layout_faults(entries, file_bytes - data_start)
    return Header(entries, frozenset(raw_entries.keys() - entries.keys()), data_start, tuple(faults))


def show(name: str) -> str:
    """`name` as it can stand in a line of text, whatever bytes a damaged file put into it."""
    if name and name.isprintable() and len(name) <= 200:
        return name
    return ascii(name[:200])


def show_some(names: list[str]) -> str:
    """The first of `names` as text, and how many more there are."""
    return show(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _length_fault(prefix_bytes: int, length: int, file_bytes: int) -> str:
    """Why a header of `length` bytes cannot be in a file of `file_bytes`."""
    if prefix_bytes < 8:
        return f"truncated: {file_bytes} bytes are too few for a safetensors file"
    if length > MAX_HEADER_BYTES:
        return f"corrupt header: a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}"
    return f"truncated or corrupt header: {length} bytes of header announced, {file_bytes - 8} bytes follow"


def _entry_faults(entry: Entry) -> list[str]:
    """Where type, shape and offsets of `entry` do not go together."""
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        return [f"unknown dtype {show(entry.dtype)}"]
    if len(entry.shape) > MAX_RANK or math.prod(max(1, size) for size in entry.shape) > _MAX_ELEMENTS:
        return ["the shape is too large"]
    needed, spanned = math.prod(entry.shape) * dtype.itemsize, entry.stop - entry.start
    if spanned != needed:
        return [f"its offsets span {spanned} bytes, {entry.dtype} {list(entry.shape)} takes {needed}"]
    return []


def _layout_faults(entries: dict[str, Entry], data_bytes: int) -> list[str]:
    """Overlaps and gaps between `entries`, and what differs between their end and the end of the file."""
    faults: list[str] = []
    end, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end and entry.stop > entry.start:
            faults.append(
                f"tensor {show(name)}: overlapping offsets: shares {end - entry.start} bytes with {show(last)}"
            )
        elif entry.start > end:
            faults.append(f"tensor {show(name)}: gap: {entry.start - end} bytes before it belong to no tensor")
        if entry.stop > end:
            end, last = entry.stop, name
    if data_bytes > end:
        faults.append(f"trailing bytes: {data_bytes - end} bytes follow the last tensor")
    elif data_bytes < end:
        cut = [name for name, entry in entries.items() if entry.stop > data_bytes]
        faults.append(f"truncated: {end - data_bytes} bytes are missing at the end, of tensor {show_some(cut)}")
    return faults


def _one_line(error: BaseException) -> str:
    """The text of `error` without line breaks, short enough for a line."""
    return show(" ".join(str(error).split()) or type(error).__name__)
