"""When a prefill leaves a commit point behind: a pure function of lengths."""

GROWTH = 1.5
"""Each commit point on the way is at least so many times as long as the one before."""


def is_due(done: int, *, prompt: int, kept: int, chunk_tokens: int, exact: bool) -> bool:
    """Whether to commit now that `done` of `prompt` positions are in the cache; the last `kept` ones are kept already.

    The end of the prompt is one. In exact mode, where pages without a state are of no use, so is the end of the chunk
    before the last, as what the client sends next may differ in the prompt's very end, such as where thinking is
    dropped from it; and some on the way.
    """
    if done <= kept or not exact:
        return done == prompt > kept
    return prompt - done <= chunk_tokens or done >= GROWTH * kept
