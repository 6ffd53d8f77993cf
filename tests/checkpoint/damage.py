"""Faults made on purpose in safetensors files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def split(path: Path) -> tuple[Header, bytes]:
    """Header and data of the file at `path`."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join(header: Header, data: bytes) -> bytes:
    """A file of this header and data."""
    text = json.dumps(header, ensure_ascii=False).encode()
    return len(text).to_bytes(8, "little") + text + data


def edit_header(path: Path, edit: Callable[[Header], object]) -> None:
    """Change the header of the file at `path`, and nothing else."""
    header, data = split(path)
    edit(header)
    path.write_bytes(join(header, data))


def drop_tensor(path: Path, name: str) -> None:
    """Remove a tensor from the file at `path` so that the file stays sound by itself."""
    header, data = split(path)
    start, stop = header.pop(name)["data_offsets"]
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= stop:
            entry["data_offsets"] = [offset - (stop - start) for offset in entry["data_offsets"]]
    path.write_bytes(join(header, data[:start] + data[stop:]))


def add_tensor(path: Path, name: str) -> None:
    """Append a tensor of four bytes to the file at `path`."""
    header, data = split(path)
    header[name] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    path.write_bytes(join(header, data + b"\0\0\0\0"))
