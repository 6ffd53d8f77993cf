"""Compute recorded turns again, and say whether every token is the same.

`dsuf serve --record-dir DIR` writes of each turn its token ids, seed, parts in the engine's plans, and where the
beginning of its prompt came from. A turn that began in a cache is replayed behind the turn that left that cache, which
is looked for among the records by its tokens; so is that one's own beginning.

    dsuf replay FILE... [--turn ID] [--model DIR] [--engine E]

The model must be the one that was recorded. Exit code 0 if all turns came out the same, 1 if not, or where one cannot
be computed again.
"""

from dsuf.replay.command import add_arguments, run

__all__ = ["add_arguments", "run"]
