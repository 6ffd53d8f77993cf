"""A short name for the weights in a directory, so that a cache made with others is never taken for their own."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from dsuf.errors import CheckpointError

SAMPLE_BYTES = 1 << 16
SAMPLES = 16


def fingerprint(directory: Path) -> str:
    """Hexadecimal digits that change with the configuration, the tokenizer, and any shard's size, header or content.

    Shards are sampled (their ends and evenly between), since half a terabyte cannot be read at every start; checking
    every byte is what digests are for. Raises `CheckpointError` if nothing is there to read.
    """
    digest = hashlib.blake2b(digest_size=16)
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{directory} holds no safetensors files")
    for name in ("config.json", "tokenizer.json"):
        digest.update((directory / name).read_bytes())
    for shard in shards:
        digest.update(shard.name.encode())
        for piece in _samples(shard):
            digest.update(piece)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """The size of `path` and pieces of it; small files are read whole."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (SAMPLES - 1) if size > SAMPLE_BYTES else SAMPLE_BYTES)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            yield file.read(SAMPLE_BYTES)
