"""From master weights to a checkpoint directory in the released layout, and back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.nano.model import Nano
from dsuf.checkpoint.draw import draw_tensors
from dsuf.checkpoint.inventory import TensorSpec, expected_tensors
from dsuf.checkpoint.packing import Packed, pack_dense, pack_fp4, pack_table
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.writer import write_descriptions, write_shards
from dsuf.reference.weights import WeightSource, dequantise_rows

_UNTRAINED_SEED = 1


def export(model: Nano, directory: Path, tokenizer: bytes, n_shards: int = 2) -> None:
    """Write `model` into the existing `directory`; `tokenizer` is its `tokenizer.json`.

    The picture tower was never trained: it gets seeded random weights, which no text reads.
    """
    specs = list(expected_tensors(model.config))
    write_shards(directory, _pack_all(specs, tensors_by_name(model)), sum(spec.bytes for spec in specs), n_shards)
    write_descriptions(directory, model.config, tokenizer)


def restore(model: Nano, directory: Path) -> None:
    """Set the masters of `model` to the values that the checkpoint in `directory` means."""
    checkpoint = Checkpoint.open(directory)
    source = WeightSource(checkpoint.tensor)
    tensors = tensors_by_name(model)
    for spec in expected_tensors(model.config):
        base = spec.name.removesuffix(".weight")
        if (target := tensors.get(base)) is None or spec.name.endswith(".scale"):
            continue
        values = _unpack(source, spec, base)
        with torch.no_grad():
            target.copy_(torch.from_numpy(values.astype(np.float32)).view(target.shape))


def tensors_by_name(model: Nano) -> dict[str, Tensor]:
    """Parameters and router biases under their released names without `.weight`; an expert's is a view of the stack."""
    found: dict[str, Tensor] = {}
    last = model.config.n_mtp_layers - 1
    moved = {"backbone.": "", "mtp.stages.": "mtp.", "mtp.intake.": "mtp.0.", "mtp.choice.": f"mtp.{last}."}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in state.items():
        for prefix, released in moved.items():
            name = released + name.removeprefix(prefix) if name.startswith(prefix) else name
        if name.endswith(".gate.weight"):
            name = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            prefix, matrix = name.rsplit(".", 1)
            found |= {f"{prefix}.{expert}.{matrix}": tensor[expert] for expert in range(len(tensor))}
        else:
            found[name] = tensor
    return found


def _pack_all(specs: list[TensorSpec], tensors: dict[str, Tensor]) -> Iterator[tuple[TensorSpec, NDArray[Any]]]:
    """Values of every tensor, each packed weight with its scale right after it."""
    untrained = [spec for spec in specs if spec.part == "vision" or spec.name.endswith(".bias_vl")]
    drawn = {spec.name: values for spec, values in draw_tensors(untrained, _UNTRAINED_SEED)}
    scale: NDArray[Any] | None = None
    for spec in specs:
        if spec.name in drawn:
            yield spec, drawn[spec.name]
        elif spec.dtype == "F8_E8M0":
            assert scale is not None, f"{spec.name} does not follow its weight"
            yield spec, scale
        else:
            codes, scale = _pack(spec, tensors[spec.name.removesuffix(".weight")].detach().float().cpu().numpy())
            yield spec, codes


def _pack(spec: TensorSpec, values: NDArray[np.float32]) -> Packed | tuple[NDArray[Any], None]:
    """`values` in the dtype of `spec`, with scales where that has any."""
    values = np.ascontiguousarray(values.reshape(-1, values.shape[-1]) if values.ndim == 3 else values)
    if spec.dtype == "I8":
        return pack_fp4(values)
    if spec.dtype == "F8_E4M3":
        return pack_table(values) if spec.part == "engram tables" else pack_dense(values)
    return values.astype(ml_dtypes.bfloat16 if spec.dtype == "BF16" else np.float32), None


def _unpack(source: WeightSource, spec: TensorSpec, base: str) -> NDArray[Any]:
    """The values of one stored tensor."""
    if spec.dtype == "I8":
        return source.expert(base)
    if spec.dtype != "F8_E4M3":
        return source.vector(spec.name)
    if spec.part == "engram tables":
        return dequantise_rows(source.tensor(spec.name), source.tensor(f"{base}.scale"))
    return source.linear(base)
