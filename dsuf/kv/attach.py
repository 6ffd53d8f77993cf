"""How much of a commit point a prompt can use: a pure function of lengths."""

from dsuf.types import SessionCache


def usable_tokens(cache: SessionCache, common: int, prompt: int) -> int:
    """Positions of `cache` from which a prompt of `prompt` tokens can go on that shares `common` tokens with it.

    At least one token of the prompt is left to compute, since its logits choose the next one. 0 means no use.
    """
    wanted = min(common, prompt - 1)
    if wanted >= cache.length:
        return cache.length
    again = cache.repeats and common == prompt == cache.length
    return wanted if again or cache.length - wanted <= cache.spare else 0
