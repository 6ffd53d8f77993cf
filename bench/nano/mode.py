"""How a training step computes."""

from typing import NamedTuple


class Mode(NamedTuple):
    """Over all visible entries or selected ones, through the storage formats or not, with drafts or without.

    In a `lesson` the indexers alone learn, from the attention that the rest pays (`bench.nano.lessons`).
    """

    dense: bool
    quantised: bool
    draft: bool
    lesson: bool = False
