"""Tensors of a checkpoint as views onto its mapped files: no byte is copied, the page cache holds the only copy."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.header import DTYPES, Entry, read_header, show
from dsuf.checkpoint.inventory import content_faults, missing_tensors
from dsuf.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

Array = np.ndarray[Any, np.dtype[Any]]


class SafetensorsFile:
    """One mapped safetensors file whose header, offsets and length are right."""

    def __init__(self, path: Path) -> None:
        """Map `path`; raises `CheckpointError` with the first fault of the file."""
        header = read_header(path)
        if header.faults:
            raise CheckpointError(f"{path.name}: {header.faults[0]}")
        self.path = path
        self.entries = header.entries
        self._data_start = header.data_start
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot map: {error.strerror}") from error

    def tensor(self, name: str) -> Array:
        """A read-only view of tensor `name`; raises `CheckpointError` if the file has none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path.name}: no tensor {show(name)}")
        count = (entry.stop - entry.start) // DTYPES[entry.dtype].itemsize
        if count == 0:
            return np.empty(entry.shape, DTYPES[entry.dtype])
        flat = np.frombuffer(self._map, DTYPES[entry.dtype], count, self._data_start + entry.start)
        return flat.reshape(entry.shape)


class Checkpoint:
    """An open checkpoint directory. `config` holds the model's sizes."""

    def __init__(self, directory: Path, config: ModelConfig, files: dict[str, SafetensorsFile]) -> None:
        """Use `open`; this takes the parts as they are. `files` maps each tensor to the file that holds it."""
        self.directory = directory
        self.config = config
        self._files = files

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Map the checkpoint in `directory`: `config.json`, and shards with their index or one `model.safetensors`.

        Raises `CheckpointError`, one line, on the first thing that is missing or wrong.
        """
        config = load_config(directory / "config.json")
        files = _map_files(directory)
        stored = {name: (file.path.name, file.entries[name]) for name, file in files.items()}
        for name in missing_tensors(config, stored):
            raise CheckpointError(f"{directory}: missing tensor {name}")
        for fault in content_faults(config, stored):
            raise CheckpointError(f"{directory}: {fault}")
        return cls(directory, config, files)

    def tensor(self, name: str) -> Array:
        """A read-only view of tensor `name` in its stored dtype and shape; it stays valid after `close`."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory}: no tensor {show(name)}")
        return file.tensor(name)

    def entry(self, name: str) -> Entry:
        """Stored dtype and shape of tensor `name`, without touching its data."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory}: no tensor {show(name)}")
        return file.entries[name]

    def names(self) -> Iterator[str]:
        """All tensor names, shard by shard."""
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def close(self) -> None:
        """Let go of the files. The map of a file is undone when the last view onto it is gone."""
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of one file as read-only views, by name; raises `CheckpointError` if the file is damaged."""
    file = SafetensorsFile(path)
    return {name: file.tensor(name) for name in file.entries}


def read_index(path: Path) -> dict[str, str]:
    """Tensor to shard, out of index file `path`; raises `CheckpointError` if it is damaged or leaves the folder."""
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: corrupt index: {' '.join(str(error).split())}") from error
    for name, shard in index.weight_map.items():
        if not shard.endswith(".safetensors") or not shard.isprintable() or "/" in shard or "\\" in shard:
            raise CheckpointError(f"{path.name}: tensor {show(name)}: {show(shard)} is not the name of a shard")
    return index.weight_map


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _map_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Each tensor's file, all of them mapped and in agreement with the index where there is one."""
    if not (directory / INDEX_NAME).exists():
        single = SafetensorsFile(directory / SINGLE_NAME)
        return dict.fromkeys(single.entries, single)
    table = read_index(directory / INDEX_NAME)
    shards = {shard: SafetensorsFile(directory / shard) for shard in sorted(set(table.values()))}
    for name, shard in table.items():
        if name not in shards[shard].entries:
            raise CheckpointError(f"{INDEX_NAME}: tensor {show(name)} is not in {shard}")
    for shard, file in shards.items():
        for name in file.entries:
            if table.get(name) != shard:
                raise CheckpointError(f"{shard}: tensor {show(name)} is not in the index under this shard")
    return {name: file for file in shards.values() for name in file.entries}
