"""The model names that requests may carry. Replies repeat the name that was sent."""

import deepseek_recipe

SERVED_NAMES = (
    "deepseek-flash",
    "DeepSeek-V4.1-Flash",
    "deepseek-v4.1-flash",
    "deepseek-ai/DeepSeek-V4.1-Flash",
    "deepseek-v4-flash",
    "deepseek-v4-flash-vision-exp",
    "deepseek-chat",
    "deepseek-reasoner",
)
"""The official id first, then other spellings, names of earlier models that it replaces, and those of old scripts."""

LISTED_NAMES = tuple(name for name in SERVED_NAMES if "vision" not in name)
"""Those that are shown: pictures are not served yet, so no list should promise them. A client's setting still works."""

FOREIGN_PREFIX = "claude-"
"""Messages clients often cannot be told another name than one that begins so; there, each of them is an alias."""


def conversion_options(
    special_tokens: deepseek_recipe.SpecialTokens, sent: str, *, foreign: bool = False
) -> deepseek_recipe.ConversionOptions:
    """Options that accept the name that was `sent` if it is served, or `foreign` and an alias; where it is neither, the
    error lists the names that are shown, as `GET /v1/models` does."""
    version = deepseek_recipe.ModelVersion.DeepseekV41Flash
    names = dict.fromkeys((*LISTED_NAMES, *([sent] if foreign or sent in SERVED_NAMES else ())), version)
    return deepseek_recipe.ConversionOptions().with_special_tokens(special_tokens).with_model_versions_by_name(names)
