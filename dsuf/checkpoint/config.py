"""The model's sizes: one struct, read from either published form of the configuration.

The release carries the same facts twice: `config.json` (nested, the Hugging Face form) and `inference/config.json`
(flat, the form that the official inference code reads). Both give an equal `ModelConfig`, except for what the flat form
does not say (token ids other than the picture's, the context length): there the released values stand.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dsuf.errors import CheckpointError

LayerMode = Literal["window", "full", "reindex", "reuse"]


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the picture tower."""

    n_layers: int
    dim: int
    n_heads: int
    inter_dim: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_n_token: int
    min_pixels: int
    max_wh_ratio: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the text backbone and the draft head, under the flat form's names.

    `compress_ratios` has an entry for each layer and then for each draft layer (0, 1 or 2 positions a compressed entry;
    0 is window-only).
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    norm_eps: float
    window_size: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    beta_fast: float
    beta_slow: float
    original_seq_len: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    n_activated_experts: int
    moe_inter_dim: int
    route_scale: float
    swiglu_limit: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_id: int
    engram_compressed_vocab_size: int
    engram_max_ngram_size: int = 4
    n_mtp_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_n_activated_experts: int
    vision: VisionConfig
    image_token_id: int
    bos_token_id: int = 0
    eos_token_id: int = 1
    max_seq_len: int = 1_048_576

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
    """What is wrong with `c`, in words."""
    found = []
    if len(c.compress_ratios) != c.n_layers + c.n_mtp_layers:
        found.append(f"compress_ratios has {len(c.compress_ratios)} entries, not {c.n_layers} + {c.n_mtp_layers}")
    elif not set(c.compress_ratios) <= {0, 1, 2}:
        found.append("compress_ratios holds a value other than 0, 1 and 2")
    else:
        found += _schedule_problems(c)
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        found.append("engram_num_embeddings and engram_layer_ids differ in length")
    if c.n_heads % c.o_groups:
        found.append(f"{c.n_heads} heads do not divide into {c.o_groups} output groups")
    if c.n_shared_experts != 1:
        found.append(f"n_shared_experts is {c.n_shared_experts}; the architecture has one")
    return found


def _schedule_problems(c: ModelConfig) -> list[str]:
    """What is wrong with the layer schedule, given ratios of the right number and values."""
    sources, compressed = set(c.kv_source_layers), [i for i in range(c.n_layers) if c.compress_ratios[i]]
    if not sources:
        return ["kv_source_layers is empty"]
    if not sources <= set(c.index_source_layers):
        return ["a layer of kv_source_layers is missing in index_source_layers"]
    if not set(c.index_source_layers) <= set(compressed):
        return ["index_source_layers names a layer without compression"]
    orphans = [i for i in compressed if i < min(sources) or c.ratio(i) != c.ratio(c.kv_source(i))]
    return [f"layer {orphans[0]} has compression but no source layer of its ratio"] if orphans else []


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
