"""Random tensors that keep every branch of the model alive: sizes of weights roughly as in the release.

Norm weights and embeddings have the magnitudes measured there. What reads a small activation (the compressor's gate,
the index weights) is scaled up, since a softmax over nearly equal values would test nothing.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.inventory import TensorSpec
from dsuf.checkpoint.packing import pack_dense, pack_fp4, pack_table

_NORM_MEANS = {
    "attn_norm": 0.025, "ffn_norm": 0.2, "attn.q_norm": 0.97, "attn.kv_norm": 0.4, "attn.compressor.norm": 0.6,
    "attn.indexer.k_norm": 0.5,
}  # fmt: skip
_NORM_SPREAD = 0.1

_GAINS = {
    "attn.wq_a": 1.6, "attn.wq_b": 0.95, "attn.wkv": 1.8, "attn.wo_a": 1.6, "attn.wo_b": 1.9, "ffn.gate": 2.9,
    "w1": 1.5, "w3": 1.5, "w2": 1.05, "attn.compressor.wkv": 1.8, "attn.compressor.wgate": 40.0,
    "attn.indexer.weights_proj": 8.0, "head": 3.0, "aligner.w2": 0.12,
}  # fmt: skip
"""Standard deviations as multiples of fan_in^-0.5; 1 for a projection that is not listed."""

_SPREADS = {
    "embed": 0.12, "engram.embed": 0.12, "markov_head.embed": 1.0, "image_start": 0.12, "image_end": 0.12,
    "image_newline": 0.12, "attn.attn_sink": 1.0, "ffn.gate.bias": 0.1, "ffn.gate.bias_vl": 0.1, "hc_attn_base": 0.5,
    "hc_ffn_base": 0.5,
}  # fmt: skip
"""Standard deviations as they are."""

_BIAS_SPREAD = 0.02
_MIXING_SCALE = 0.5


def draw_tensors(specs: Iterable[TensorSpec], seed: int) -> Iterator[tuple[TensorSpec, NDArray[Any]]]:
    """Values for each of `specs`; they depend on `seed` and the tensor's name, not on what else is drawn.

    A packed weight must come right before its scale, as in `expected_tensors`.
    """
    scale: NDArray[Any] | None = None
    for spec in specs:
        if spec.dtype == "F8_E8M0":
            if scale is None or scale.shape != spec.shape:
                raise ValueError(f"{spec.name} does not follow its weight")
            yield spec, scale
            continue
        codes, scale = _pack(spec, _draw(spec, seed))
        yield spec, codes


def _pack(spec: TensorSpec, values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """`values` in the dtype of `spec`, with scales where that has any."""
    if spec.dtype == "I8":
        return pack_fp4(values)
    if spec.dtype == "F8_E4M3":
        return pack_table(values) if spec.part == "engram tables" else pack_dense(values)
    return values.astype(ml_dtypes.bfloat16 if spec.dtype == "BF16" else np.float32), None


def _draw(spec: TensorSpec, seed: int) -> NDArray[np.float32]:
    """Random values of the tensor before packing."""
    shape = (spec.shape[0], 2 * spec.shape[1]) if spec.dtype == "I8" else spec.shape
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    mean, spread = _moments(spec.name, shape)
    return rng.standard_normal(shape, np.float32) * np.float32(spread) + np.float32(mean)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of tensor `name`."""
    role = re.sub(r"^(layers|mtp|vision\.blocks)\.\d+\.", "", name).removesuffix(".weight")
    if role in _SPREADS:
        return 0.0, _SPREADS[role]
    if role.endswith(("norm", "norm1", "norm2", ".q_weight", ".k_weight")):
        mean = _NORM_MEANS.get(role, 1.0)
        return mean, mean * _NORM_SPREAD
    if role.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return _MIXING_SCALE, _MIXING_SCALE * _NORM_SPREAD
    if role.endswith(".bias"):
        return 0.0, _BIAS_SPREAD
    last = role.rsplit(".", 1)[-1]
    gain = _GAINS.get(role, _GAINS.get(last, 1.0) if role.startswith("ffn.") else 1.0)
    return 0.0, gain * float(shape[-1]) ** -0.5
