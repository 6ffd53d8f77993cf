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
"""Those that are shown: pictures are not served yet, so no name should promise them."""

FOREIGN_PREFIX = "claude-"
"""Messages clients often cannot be told another name than one that begins so; there, each of them is an alias."""


def conversion_options(
    special_tokens: deepseek_recipe.SpecialTokens, *aliases: str
) -> deepseek_recipe.ConversionOptions:
    """Options that accept the served names and `aliases`, and nothing else."""
    version = deepseek_recipe.ModelVersion.DeepseekV41Flash
    names = dict.fromkeys((*SERVED_NAMES, *aliases), version)
    return deepseek_recipe.ConversionOptions().with_special_tokens(special_tokens).with_model_versions_by_name(names)
