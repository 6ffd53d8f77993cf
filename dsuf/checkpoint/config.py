"""The model's sizes: one struct, read from either published form of the configuration.

The release carries the same facts twice: `config.json` (nested, the Hugging Face form) and `inference/config.json`
(flat, the form that the official inference code reads). Both give an equal `ModelConfig`, except for what the flat form
does not say (token ids other than the picture's, the context length): there the released values stand.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsuf.errors import CheckpointError

LayerMode = Literal["window", "full", "reindex", "reuse"]

# Far above any model of this architecture: what is over them is a mistake, and would take forever or all memory.
Depth = Annotated[int, Meta(ge=1, le=1_000)]
Count = Annotated[int, Meta(ge=1, le=65_536)]
Layer = Annotated[int, Meta(ge=0, lt=1_000)]
Width = Annotated[int, Meta(ge=1, le=1_048_576)]
Vocabulary = Annotated[int, Meta(ge=1, le=16_777_216)]
Token = Annotated[int, Meta(ge=0, lt=16_777_216)]
Length = Annotated[int, Meta(ge=1, le=1 << 30)]
TableRows = Annotated[int, Meta(ge=1, le=1 << 36)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
RopeBase = Annotated[float, Meta(gt=1, le=1e12)]
MAX_EXPERTS = 100_000
"""Routed experts of all layers together."""
MAX_HASHES = 4_096
"""Hashes of all Engram layers together: each needs a prime number of its own."""
QUANTISED = 32
"""Values that share one scale where a weight, an activation or a cache row is quantised."""


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the picture tower."""

    n_layers: Depth
    dim: Width
    n_heads: Count
    inter_dim: Width
    patch_size: Depth
    rope_theta: RopeBase
    downsample_ratio: Depth
    max_n_token: Width
    min_pixels: Length
    max_wh_ratio: Positive | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the text backbone and the draft head, under the flat form's names.

    `compress_ratios` has an entry for each layer and then for each draft layer (0, 1 or 2 positions a compressed entry;
    0 is window-only).
    """

    vocab_size: Vocabulary
    dim: Width
    n_layers: Depth
    n_heads: Count
    head_dim: Width
    rope_head_dim: Width
    q_lora_rank: Width
    o_groups: Count
    o_lora_rank: Width
    norm_eps: Positive
    window_size: Width
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[Layer, ...]
    index_source_layers: tuple[Layer, ...]
    rope_theta: RopeBase
    compress_rope_theta: RopeBase
    rope_factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    original_seq_len: Length
    index_n_heads: Count
    index_head_dim: Width
    index_topk: Width
    candidate_source_layer: Layer
    candidate_topk_blocks: Length
    candidate_block_size: Count
    hc_mult: Annotated[int, Meta(ge=1, le=64)]
    hc_sinkhorn_iters: Depth
    hc_eps: Positive
    n_routed_experts: Count
    n_shared_experts: Count
    n_activated_experts: Count
    moe_inter_dim: Width
    route_scale: Positive
    swiglu_limit: Positive
    engram_layer_ids: tuple[Layer, ...]
    engram_num_embeddings: tuple[TableRows, ...]
    engram_vocab_size: Length
    engram_n_heads: Count
    engram_head_dim: Width
    engram_pad_id: Token
    engram_compressed_vocab_size: Vocabulary
    engram_max_ngram_size: Annotated[int, Meta(ge=2, le=16)] = 4
    n_mtp_layers: Annotated[int, Meta(ge=0, le=100)]
    dspark_block_size: Depth
    dspark_noise_token_id: Token
    dspark_target_layer_ids: tuple[Layer, ...]
    dspark_markov_rank: Width
    dspark_n_routed_experts: Count
    dspark_n_activated_experts: Count
    vision: VisionConfig
    image_token_id: Token
    bos_token_id: Token = 0
    eos_token_id: Token = 1
    max_seq_len: Length = 1_048_576

    def __post_init__(self) -> None:
        """Refuse sizes that no model of this architecture can have; raises `CheckpointError`."""
        for problem in _problems(self):
            raise CheckpointError(f"config: {problem}")

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last that makes compressed KV. Nothing above it is needed of most prompt tokens."""
        return self.kv_source_layers[-1]

    def ratio(self, layer: int) -> int:
        """Positions a compressed entry of `layer` covers; 0 for a layer that only has its window."""
        return self.compress_ratios[layer]

    def mode(self, layer: int) -> LayerMode:
        """What `layer` does about compressed KV."""
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layers:
            return "full"
        return "reindex" if layer in self.index_source_layers else "reuse"

    def kv_source(self, layer: int) -> int:
        """The Full layer whose compressed KV and index keys `layer` reads."""
        return max(source for source in self.kv_source_layers if source <= layer)


def _problems(c: ModelConfig) -> list[str]:
    """What is wrong between the sizes of `c`, in words; each by itself is in its range."""
    found = []
    if len(c.compress_ratios) != c.n_layers + c.n_mtp_layers:
        found.append(f"compress_ratios has {len(c.compress_ratios)} entries, not {c.n_layers} + {c.n_mtp_layers}")
    elif not set(c.compress_ratios) <= {0, 1, 2}:
        found.append("compress_ratios holds a value other than 0, 1 and 2")
    else:
        found += _schedule_problems(c)
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        found.append("engram_num_embeddings and engram_layer_ids differ in length")
    if c.n_shared_experts != 1:
        found.append(f"n_shared_experts is {c.n_shared_experts}; the architecture has one")
    return found + _width_problems(c) + _count_problems(c) + _token_problems(c)


def _width_problems(c: ModelConfig) -> list[str]:
    """Widths that do not divide as heads, groups or blocks of one scale must."""
    if c.n_heads % c.o_groups:
        return [f"{c.n_heads} heads do not divide into {c.o_groups} output groups"]
    if c.rope_head_dim % 2 or c.rope_head_dim > min(c.head_dim, c.index_head_dim):
        return [f"rope_head_dim is {c.rope_head_dim}; it must be even, and no more than head_dim and index_head_dim"]
    quantised = {
        "dim": c.dim, "q_lora_rank": c.q_lora_rank, "moe_inter_dim": c.moe_inter_dim, "head_dim": c.head_dim,
        "index_head_dim": c.index_head_dim, "o_groups times o_lora_rank": c.o_groups * c.o_lora_rank,
        "the width of an Engram row": (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim,
    }  # fmt: skip
    return [f"{name} is {width}, no multiple of {QUANTISED}" for name, width in quantised.items() if width % QUANTISED]


def _count_problems(c: ModelConfig) -> list[str]:
    """More experts chosen than there are, and more of anything than could be looked through."""
    choices = {"": (c.n_activated_experts, c.n_routed_experts)}
    choices["dspark_"] = (c.dspark_n_activated_experts, c.dspark_n_routed_experts)
    found = [
        f"{kind}n_activated_experts is {chosen} of {experts} experts"
        for kind, (chosen, experts) in choices.items() if chosen > experts
    ]  # fmt: skip
    if (total := c.n_layers * c.n_routed_experts + c.n_mtp_layers * c.dspark_n_routed_experts) > MAX_EXPERTS:
        found.append(f"{total} experts in all layers, more than {MAX_EXPERTS}")
    if (total := len(c.engram_layer_ids) * (c.engram_max_ngram_size - 1) * c.engram_n_heads) > MAX_HASHES:
        found.append(f"{total} Engram hashes in all layers, more than {MAX_HASHES}")
    return found


def _token_problems(c: ModelConfig) -> list[str]:
    """Token ids outside the vocabulary."""
    names = ("bos_token_id", "eos_token_id", "image_token_id", "engram_pad_id", "dspark_noise_token_id")
    return [f"{name} is {getattr(c, name)}, the vocabulary has {c.vocab_size}" for name in names
            if getattr(c, name) >= c.vocab_size]  # fmt: skip


def _schedule_problems(c: ModelConfig) -> list[str]:
    """What is wrong with the layer schedule, given ratios of the right number and values."""
    for name, problem in _layer_list_problems(c).items():
        return [f"{name} {problem}"]
    sources, compressed = set(c.kv_source_layers), [i for i in range(c.n_layers) if c.compress_ratios[i]]
    if not sources:
        return ["kv_source_layers is empty"]
    if not sources <= set(c.index_source_layers):
        return ["a layer of kv_source_layers is missing in index_source_layers"]
    if not set(c.index_source_layers) <= set(compressed):
        return ["index_source_layers names a layer without compression"]
    if c.candidate_source_layer not in sources:
        return [f"candidate_source_layer is {c.candidate_source_layer}, which kv_source_layers does not name"]
    orphans = [i for i in compressed if i < min(sources) or c.ratio(i) != c.ratio(c.kv_source(i))]
    return [f"layer {orphans[0]} has compression but no source layer of its ratio"] if orphans else []


def _layer_list_problems(c: ModelConfig) -> dict[str, str]:
    """What is wrong with a list of layers, by its name. Without a draft head nobody reads its target layers."""
    names = ["kv_source_layers", "index_source_layers", "engram_layer_ids"]
    names += ["dspark_target_layer_ids"] if c.n_mtp_layers else []
    found: dict[str, str] = {}
    for name in names:
        layers: tuple[int, ...] = getattr(c, name)
        if list(layers) != sorted(set(layers)):
            found[name] = "is not in ascending order"
        elif layers and layers[-1] >= c.n_layers:
            found[name] = f"names a layer outside 0 to {c.n_layers - 1}"
    if c.n_mtp_layers and not c.dspark_target_layer_ids:
        found["dspark_target_layer_ids"] = "is empty"
    return found


# Names in the nested form where they are not those of the flat one, and where in it the others are.
NESTED_NAMES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim", "norm_eps": "rms_norm_eps", "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids", "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id", "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size", "route_scale": "routed_scaling_factor",
    "engram_pad_id": "engram_pad_token_id", "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok", "max_seq_len": "max_position_embeddings",
}  # fmt: skip
ROPE_NAMES = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}
VISION_NAMES = {
    "n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads",
    "inter_dim": "intermediate_size", "max_n_token": "max_image_tokens",
}  # fmt: skip
ROOT_NAMES = ("image_token_id", "bos_token_id", "eos_token_id")


def parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """A `ModelConfig` from the decoded JSON of either form; raises `CheckpointError` naming what is wrong."""
    try:
        fields = _from_nested(data) if "text_config" in data else _from_flat(data)
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"config: {error}") from error
    except (AttributeError, TypeError) as error:
        raise CheckpointError("config: a section is not a JSON object") from error


def load_config(path: Path) -> ModelConfig:
    """Read `path`, a configuration file of either form; raises `CheckpointError`."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"config: cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"config: {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"config: {path} is not a JSON object")
    return parse_config(data)


def _from_nested(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` under their own names, out of the nested form."""
    text, rope, vision = data["text_config"], data["text_config"].get("rope_scaling", {}), data.get("vision_config", {})
    fields = {name: text[NESTED_NAMES.get(name, name)] for name in ModelConfig.__struct_fields__
              if NESTED_NAMES.get(name, name) in text}  # fmt: skip
    fields |= {name: rope[theirs] for name, theirs in ROPE_NAMES.items() if theirs in rope}
    fields |= {name: data[name] for name in ROOT_NAMES if name in data}
    fields["vision"] = {name: vision[VISION_NAMES.get(name, name)] for name in VisionConfig.__struct_fields__
                        if VISION_NAMES.get(name, name) in vision}  # fmt: skip
    return fields


def _from_flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` out of the flat form, where the vision sizes carry a prefix."""
    fields = {name: data[name] for name in ModelConfig.__struct_fields__ if name in data}
    fields["vision"] = {name: data[f"vision_{name}"] for name in VisionConfig.__struct_fields__
                        if f"vision_{name}" in data}  # fmt: skip
    return fields
