"""A `ModelConfig` written in the two published forms, with the released files as pattern for what it does not hold."""

from pathlib import Path
from typing import Any

import msgspec

from dsuf.checkpoint.config import NESTED_NAMES, ROOT_NAMES, ROPE_NAMES, VISION_NAMES, ModelConfig

RELEASED = Path(__file__).parent / "released"
"""Configuration and tokenizer as DeepSeek published them."""
NANO = Path(__file__).parents[1] / "nano"
"""The small trained model that ships with the code."""


def nested_form(config: ModelConfig) -> dict[str, Any]:
    """What `config.json` holds; `parse_config` gives an equal `config` back."""
    data: dict[str, Any] = msgspec.json.decode((RELEASED / "config.json").read_bytes())
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name != "vision"}
    data |= {name: fields.pop(name) for name in ROOT_NAMES}
    data["pad_token_id"] = config.engram_pad_id
    text = data["text_config"]
    text["rope_scaling"] |= {theirs: fields.pop(name) for name, theirs in ROPE_NAMES.items()}
    text |= {NESTED_NAMES.get(name, name): value for name, value in fields.items()}
    vision = {name: getattr(config.vision, name) for name in config.vision.__struct_fields__}
    data["vision_config"] |= {VISION_NAMES.get(name, name): value for name, value in vision.items()}
    return data


def flat_form(config: ModelConfig) -> dict[str, Any]:
    """What `inference/config.json` holds; the context length and the token ids but the picture's are not in it."""
    pattern: dict[str, Any] = msgspec.json.decode((RELEASED / "inference_config.json").read_bytes())
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name != "vision"}
    fields |= {f"vision_{name}": getattr(config.vision, name) for name in config.vision.__struct_fields__}
    return {name: fields.get(name, value) for name, value in pattern.items()}
