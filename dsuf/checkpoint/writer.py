"""Writing a checkpoint directory in the released layout: shards, their index, configuration and tokenizer."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.forms import RELEASED, flat_form, nested_form
from dsuf.checkpoint.header import DTYPES
from dsuf.checkpoint.inventory import TensorSpec
from dsuf.checkpoint.shards import INDEX_NAME

_ALIGNMENT = 8

Drawn = tuple[TensorSpec, NDArray[Any]]


def write_safetensors(path: Path, tensors: Sequence[Drawn]) -> None:
    """Write one file. Wide types come first, so that every tensor starts at a multiple of its item size."""
    ordered = sorted(tensors, key=lambda drawn: -DTYPES[drawn[0].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec, _ in ordered:
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (end, end + spec.bytes)}
        end += spec.bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec, values in ordered:
            if values.shape != spec.shape or values.dtype != DTYPES[spec.dtype]:
                raise ValueError(f"{spec.name}: {values.dtype} {values.shape} is not what {spec} says")
            file.write(values.tobytes())


def write_shards(directory: Path, tensors: Iterable[Drawn], total_bytes: int, n_shards: int) -> None:
    """Write `tensors`, `total_bytes` in all, into `n_shards` files of about equal size, and the index.

    Holds one shard in memory at a time.
    """
    weight_map: dict[str, str] = {}
    pending: list[Drawn] = []
    done, shard = 0, 1

    def flush() -> None:
        name = f"model-{shard:05}-of-{n_shards:05}.safetensors"
        write_safetensors(directory / name, pending)
        weight_map.update({spec.name: name for spec, _ in pending})
        pending.clear()

    for drawn in tensors:
        pending.append(drawn)
        done += drawn[0].bytes
        if shard < n_shards and done * n_shards >= total_bytes * shard:
            flush()
            shard += 1
    flush()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_bytes(_pretty(index))


def write_descriptions(directory: Path, config: ModelConfig, tokenizer: bytes) -> None:
    """Write both forms of the configuration, and the tokenizer, whose `tokenizer.json` is given."""
    (directory / "inference").mkdir(exist_ok=True)
    (directory / "config.json").write_bytes(_pretty(nested_form(config)))
    (directory / "inference" / "config.json").write_bytes(_pretty(flat_form(config)))
    (directory / "tokenizer.json").write_bytes(tokenizer)
    (directory / "tokenizer_config.json").write_bytes((RELEASED / "tokenizer_config.json").read_bytes())


def _pretty(data: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"
