"""When a prefill leaves a commit point behind: a pure function of lengths."""

GROWTH = 1.5
"""Each commit point on the way is at least so many times as long as the one before."""


def is_due(done: int, *, prompt: int, kept: int, chunk_tokens: int) -> bool:
    """Whether to commit now that `done` of `prompt` positions are in the cache; the last `kept` ones are kept already.

    The end of the prompt is one, and the end of the chunk before the last: what the client sends next may differ in the
    prompt's very end, such as where thinking is dropped from it.
    """
    if done <= kept:
        return False
    return prompt - done <= chunk_tokens or done >= GROWTH * kept
