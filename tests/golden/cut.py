"""Cuts a whole golden directory down to what a repository can hold: `python tests/golden/cut.py WHOLE tests/golden`.

Nothing is computed. What the official code did in its first layers on the first tokens of a text does not depend on the
rest, so the rest can go: layers, positions, draft head, and the rows of tables that the text does not read. The picture
tower stays as zeros, since a checkpoint must have one.
"""

import io
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.header import DTYPES
from dsuf.checkpoint.inventory import TensorSpec, expected_tensors
from dsuf.checkpoint.shards import SINGLE_NAME, Checkpoint, read_safetensors
from dsuf.checkpoint.token_map import TokenMap
from dsuf.checkpoint.writer import write_descriptions, write_safetensors
from dsuf.golden.measure import Array

LAYERS, POSITIONS = 10, 40
"""The tenth layer is the first that chooses among candidates; with 40 positions there is something to leave out."""
TRACES = ("trace_fp32", "trace_official")
ARCHIVE = "prefix.tar.xz"
# Literals by position in groups of four bytes: the bytes of a float32 have little to do with each other.
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}]
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def cut_config(whole: ModelConfig) -> ModelConfig:
    """The configuration of the first layers, without a draft head."""
    return msgspec.structs.replace(
        whole, n_layers=LAYERS, n_mtp_layers=0, compress_ratios=whole.compress_ratios[:LAYERS],
        kv_source_layers=tuple(layer for layer in whole.kv_source_layers if layer < LAYERS),
        index_source_layers=tuple(layer for layer in whole.index_source_layers if layer < LAYERS),
    )  # fmt: skip


def cut_weights(source: Path, target: Path, config: ModelConfig, ids: Array) -> None:
    """Write the tensors that a run over `ids` reads; the others are zeros."""
    checkpoint = Checkpoint.open(source)
    engram_hash = EngramHash.from_config(config, TokenMap.from_tokenizer(source / "tokenizer.json"))
    drawn = []
    for spec in expected_tensors(config):
        tensor = checkpoint.tensor(spec.name)
        if spec.part == "engram tables":
            slot = config.engram_layer_ids.index(int(spec.name.split(".")[1]))
            tensor = keep_rows(tensor, engram_hash.rows(slot, engram_hash.history(ids)))
        elif spec.name == "embed.weight":
            tensor = keep_rows(tensor, ids)
        elif spec.part == "vision" or spec.name == "head.weight":
            tensor = np.zeros_like(tensor)
        drawn.append((spec, tensor))
    write_safetensors(target / SINGLE_NAME, drawn)
    write_descriptions(target, config, (source / "tokenizer.json").read_bytes())


def keep_rows(table: Array, rows: Array) -> Array:
    """`table` with zeros in all but `rows`."""
    kept = np.zeros_like(table)
    kept[rows.ravel()] = table[rows.ravel()]
    return kept


def cut_trace(tensors: dict[str, Array], config: ModelConfig) -> dict[str, Array]:
    """The first layers and positions of a trace."""
    kept = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "layers" and int(parts[1]) >= LAYERS:
            continue
        entries = POSITIONS // max(1, config.ratio(int(parts[1]))) if parts[0] == "layers" else 0
        rows = entries if parts[-1] in ("compressed_latent_pre_rope", "compressed_kv", "index_k") else POSITIONS
        columns = entries if parts[-1] in ("index_score", "candidates") else None
        kept[name] = tensor[:rows] if columns is None else tensor[:rows, :columns]
    return kept


def main(source: Path, target: Path) -> None:
    """Cut `source` down into one archive in `target`."""
    config = cut_config(load_config(source / "tiny" / "config.json"))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "tiny").mkdir()
        (folder / "cases").mkdir()
        traces = {name: read_safetensors(source / "cases" / f"{name}.safetensors") for name in TRACES}
        cut_weights(source / "tiny", folder / "tiny", config, traces[TRACES[0]]["input_ids"][:POSITIONS])
        for name, tensors in traces.items():
            kept = cut_trace(tensors, config)
            drawn = [(TensorSpec(key, _NAMES[value.dtype], value.shape, "head"), value) for key, value in kept.items()]
            write_safetensors(folder / "cases" / f"{name}.safetensors", drawn)
        pack(folder, target / ARCHIVE)


def pack(folder: Path, archive: Path) -> None:
    """Write all files under `folder` into `archive`; equal files give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    archive.write_bytes(lzma.compress(buffer.getvalue(), filters=_XZ))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
