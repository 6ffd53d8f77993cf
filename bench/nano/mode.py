"""How a training step computes."""

from typing import NamedTuple


class Mode(NamedTuple):
    """Over all visible entries or selected ones, through the storage formats or not, with drafts or without."""

    dense: bool
    quantised: bool
    draft: bool
