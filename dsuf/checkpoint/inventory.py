"""The tensors that a checkpoint of given sizes must hold: names, dtypes, shapes and bytes, in order of computation."""

from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod
from typing import Literal

import msgspec

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.header import DTYPES, Entry, show

Part = Literal[
    "embedding", "attention", "mixing", "shared experts", "routed experts", "engram", "engram tables", "head", "draft",
    "vision",
]  # fmt: skip
"""What a tensor belongs to; a router counts with the shared experts, a norm with what reads it."""

PARTS: tuple[Part, ...] = (
    "embedding", "attention", "mixing", "shared experts", "routed experts", "engram", "engram tables", "head", "draft",
    "vision",
)  # fmt: skip

BLOCK = 32
"""Values that share one scale, along each axis of a dense weight and along a row of an expert or an Engram table."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor that must be there. `dtype` is a safetensors name; `also` is another one that is as good."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part
    also: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of data in the expected dtype."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def faults(self, entry: Entry) -> list[str]:
        """How the stored `entry` differs, in words; empty if it is right."""
        found = []
        if entry.dtype not in (self.dtype, self.also):
            found.append(f"wrong dtype: {show(entry.dtype)}, expected {self.dtype}")
        if entry.shape != self.shape:
            found.append(f"wrong shape: {list(entry.shape)}, expected {list(self.shape)}")
        return found


def expected_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint of these sizes, draft head and picture tower included."""
    yield TensorSpec("embed.weight", "BF16", (config.vocab_size, config.dim), "embedding")
    for layer in range(config.n_layers):
        yield from _layer(config, layer)
    yield TensorSpec("norm.weight", "BF16", (config.dim,), "head")
    yield TensorSpec("head.weight", "BF16", (config.vocab_size, config.dim), "head")
    for stage in range(config.n_mtp_layers):
        yield from _draft_stage(config, stage)
    yield from _vision(config)


def _layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Tensors of one layer of the backbone."""
    prefix = f"layers.{layer}"
    if layer in config.engram_layer_ids:
        yield from _engram(config, layer)
    yield from _mixing(config, prefix, "mixing")
    yield from _attention(config, f"{prefix}.attn", "attention")
    yield TensorSpec(f"{prefix}.attn_norm.weight", "BF16", (config.dim,), "attention")
    if layer in config.kv_source_layers:
        yield from _compressor(config, layer)
    if layer in config.index_source_layers:
        yield from _dense(f"{prefix}.attn.indexer.wq_b", config.index_n_heads * config.index_head_dim,
                          config.q_lora_rank, "attention")  # fmt: skip
        shape = (config.index_n_heads, config.dim)
        yield TensorSpec(f"{prefix}.attn.indexer.weights_proj.weight", "BF16", shape, "attention")
    yield from _experts(config, prefix, config.n_routed_experts, "shared experts", "routed experts")


def _dense(name: str, rows: int, columns: int, part: Part) -> Iterator[TensorSpec]:
    """An fp8 weight [rows, columns] and its scales, one for each block of 32 x 32."""
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (rows, columns), part)
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (_blocks(rows), _blocks(columns)), part)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _mixing(c: ModelConfig, prefix: str, part: Part) -> Iterator[TensorSpec]:
    """The hyper-connections of both sites of a layer."""
    outputs = c.hc_mult * (2 + c.hc_mult)
    for site in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}.hc_{site}_fn", "F32", (outputs, c.hc_mult * c.dim), part)
        yield TensorSpec(f"{prefix}.hc_{site}_base", "F32", (outputs,), part)
        yield TensorSpec(f"{prefix}.hc_{site}_scale", "F32", (3,), part)


def _attention(c: ModelConfig, prefix: str, part: Part) -> Iterator[TensorSpec]:
    """What every layer's attention has, whatever its mode."""
    yield from _dense(f"{prefix}.wq_a", c.q_lora_rank, c.dim, part)
    yield TensorSpec(f"{prefix}.q_norm.weight", "BF16", (c.q_lora_rank,), part)
    yield from _dense(f"{prefix}.wq_b", c.n_heads * c.head_dim, c.q_lora_rank, part)
    yield from _dense(f"{prefix}.wkv", c.head_dim, c.dim, part)
    yield TensorSpec(f"{prefix}.kv_norm.weight", "BF16", (c.head_dim,), part)
    yield from _dense(f"{prefix}.wo_a", c.o_groups * c.o_lora_rank, c.n_heads // c.o_groups * c.head_dim, part)
    yield from _dense(f"{prefix}.wo_b", c.dim, c.o_groups * c.o_lora_rank, part)
    yield TensorSpec(f"{prefix}.attn_sink", "F32", (c.n_heads,), part)


def _compressor(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """What a Full layer has besides: compressed KV and index keys made of it. One position a group needs no gate."""
    prefix = f"layers.{layer}.attn"
    yield TensorSpec(f"{prefix}.compressor.wkv.weight", "BF16", (c.head_dim, c.dim), "attention")
    if c.ratio(layer) > 1:
        yield TensorSpec(f"{prefix}.compressor.wgate.weight", "BF16", (c.head_dim, c.dim), "attention")
    yield TensorSpec(f"{prefix}.compressor.norm.weight", "BF16", (c.head_dim,), "attention")
    yield TensorSpec(f"{prefix}.indexer.wk.weight", "BF16", (c.index_head_dim, c.head_dim), "attention")
    yield TensorSpec(f"{prefix}.indexer.k_norm.weight", "BF16", (c.index_head_dim,), "attention")


def _experts(c: ModelConfig, prefix: str, n_routed: int, shared: Part, routed: Part) -> Iterator[TensorSpec]:
    """Router, shared expert and routed experts; a routed expert packs two fp4 values a byte, with scales per row."""
    yield TensorSpec(f"{prefix}.ffn_norm.weight", "BF16", (c.dim,), shared)
    yield TensorSpec(f"{prefix}.ffn.gate.weight", "BF16", (n_routed, c.dim), shared)
    yield TensorSpec(f"{prefix}.ffn.gate.bias", "F32", (n_routed,), shared)
    yield TensorSpec(f"{prefix}.ffn.gate.bias_vl", "F32", (n_routed,), shared)
    sizes = {"w1": (c.moe_inter_dim, c.dim), "w2": (c.dim, c.moe_inter_dim), "w3": (c.moe_inter_dim, c.dim)}
    for matrix, (rows, columns) in sizes.items():
        yield from _dense(f"{prefix}.ffn.shared_experts.{matrix}", rows, columns, shared)
    packed = {matrix: (rows, columns // 2) for matrix, (rows, columns) in sizes.items()}
    scales = {matrix: (rows, _blocks(columns)) for matrix, (rows, columns) in sizes.items()}
    for expert in range(n_routed):
        for matrix in sizes:
            name = f"{prefix}.ffn.experts.{expert}.{matrix}"
            yield TensorSpec(f"{name}.weight", "I8", packed[matrix], routed)
            yield TensorSpec(f"{name}.scale", "F8_E8M0", scales[matrix], routed)


def _engram(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """The n-gram table before a layer and its projection to one key a stream and one value."""
    prefix = f"layers.{layer}.engram"
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    yield TensorSpec(f"{prefix}.embed.weight", "F8_E4M3", (rows, c.engram_head_dim), "engram tables")
    yield TensorSpec(f"{prefix}.embed.scale", "F8_E8M0", (rows, _blocks(c.engram_head_dim)), "engram tables")
    yield from _dense(f"{prefix}.wkv", (c.hc_mult + 1) * c.dim, columns, "engram")
    for side in ("q", "k"):
        yield TensorSpec(f"{prefix}.{side}_weight", "BF16", (c.hc_mult, c.dim), "engram")


def _draft_stage(c: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """A stage of the draft head; the first one takes in the backbone's streams, the last one makes tokens."""
    prefix = f"mtp.{stage}"
    yield from _mixing(c, prefix, "draft")
    yield from _attention(c, f"{prefix}.attn", "draft")
    yield TensorSpec(f"{prefix}.attn_norm.weight", "BF16", (c.dim,), "draft")
    yield from _experts(c, prefix, c.dspark_n_routed_experts, "draft", "draft")
    if stage == 0:
        yield from _dense(f"{prefix}.main_proj", c.dim, len(c.dspark_target_layer_ids) * c.dim, "draft")
        yield TensorSpec(f"{prefix}.main_norm.weight", "BF16", (c.dim,), "draft")
    if stage == c.n_mtp_layers - 1:
        rank = c.dspark_markov_rank
        yield TensorSpec(f"{prefix}.norm.weight", "BF16", (c.dim,), "draft")
        yield TensorSpec(f"{prefix}.markov_head.embed.weight", "BF16", (c.vocab_size, rank), "draft")
        yield TensorSpec(f"{prefix}.markov_head.head.weight", "BF16", (c.vocab_size, rank), "draft")
        yield TensorSpec(f"{prefix}.confidence_head.proj.weight", "BF16", (1, c.dim + rank), "draft")


def _vision(c: ModelConfig) -> Iterator[TensorSpec]:
    """The picture tower, the aligner to the model's width, and the three vectors that frame a picture."""
    v = c.vision
    yield from _affine("vision.patch_embed.proj", v.dim, 3 * v.patch_size**2)
    for block in range(v.n_layers):
        prefix = f"vision.blocks.{block}"
        yield _vector(f"{prefix}.norm1.weight", v.dim)
        yield from _affine(f"{prefix}.attn.wqkv", 3 * v.dim, v.dim)
        yield from _affine(f"{prefix}.attn.wo", v.dim, v.dim)
        yield _vector(f"{prefix}.norm2.weight", v.dim)
        yield TensorSpec(f"{prefix}.mlp.w1.weight", "BF16", (2 * v.inter_dim, v.dim), "vision")
        yield TensorSpec(f"{prefix}.mlp.w2.weight", "BF16", (v.dim, v.inter_dim), "vision")
    yield _vector("vision.norm.weight", v.dim)
    yield from _affine("aligner.w1", c.dim, v.dim * v.downsample_ratio**2)
    yield from _affine("aligner.w2", c.dim, c.dim)
    for name in ("image_start", "image_end", "image_newline"):
        yield _vector(name, c.dim)


def _affine(name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    """A BF16 weight with a bias."""
    yield TensorSpec(f"{name}.weight", "BF16", (rows, columns), "vision")
    yield TensorSpec(f"{name}.bias", "BF16", (rows,), "vision")


def _vector(name: str, size: int) -> TensorSpec:
    """A norm or delimiter of the picture tower, which some checkpoints store unrounded."""
    return TensorSpec(name, "BF16", (size,), "vision", also="F32")


class Tally(msgspec.Struct, frozen=True):
    """How many tensors, and how many bytes they take."""

    tensors: int = 0
    bytes: int = 0


def tally(specs: Iterable[TensorSpec]) -> dict[tuple[Part, str], Tally]:
    """Counts and bytes of `specs` by part and dtype."""
    table: dict[tuple[Part, str], Tally] = {}
    for spec in specs:
        old = table.get((spec.part, spec.dtype), Tally())
        table[spec.part, spec.dtype] = Tally(old.tensors + 1, old.bytes + spec.bytes)
    return table


def missing_tensors(config: ModelConfig, stored: Container[str]) -> Iterator[str]:
    """Names of the expected tensors that are not in `stored`."""
    return (spec.name for spec in expected_tensors(config) if spec.name not in stored)


def content_faults(config: ModelConfig, stored: Mapping[str, tuple[str, Entry]]) -> Iterator[str]:
    """One line for each tensor of `stored` (by name: file and entry) that is not expected, or not like that."""
    expected = {spec.name: spec for spec in expected_tensors(config)}
    for name, (file, entry) in stored.items():
        if name in expected:
            yield from (f"{file}: tensor {name}: {fault}" for fault in expected[name].faults(entry))
        else:
            yield f"{file}: tensor {show(name)}: unknown tensor: the configuration has none of this name"
