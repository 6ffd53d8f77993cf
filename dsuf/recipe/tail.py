"""The tokens that the library holds back because they end within a character.

It gives their text with the token that completes it, and never if the reply ends first; with them it forgets every
other token of the same push, and does not count them. So a push ends where a character does if it can, and what is held
in the end is handed over as text.
"""

from collections.abc import Sequence

from dsuf.recipe.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class Tail:
    """Follows which of the tokens pushed last are held back.

    A token whose own text ends with a whole character releases everything, since no byte before can change that
    character. Only tokens that end within one are looked at together.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def text(self) -> str:
        """What is held, with a replacement character for the unfinished one."""
        return self._vocabulary.decode(self._held)

    def releases(self, ids: Sequence[int]) -> bool:
        """Whether `ids`, pushed as they are, end with a whole character, so that nothing is held any more."""
        if self._vocabulary.ends_open(ids[-1]):
            return False
        self._held.clear()
        return True

    def cut(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """`ids` in pieces to push: the longest one that ends with a whole character, then each token apart."""
        whole = len(ids)
        while whole and self._vocabulary.ends_open(ids[whole - 1]):
            whole -= 1
        singles = [ids[place : place + 1] for place in range(whole, len(ids))]
        return [ids[:whole], *singles] if whole else singles

    def add(self, piece: Sequence[int]) -> None:
        """Note that `piece`, one of those that `cut` made, was pushed."""
        if not self._vocabulary.ends_open(piece[-1]):
            self._held.clear()
            return
        self._held.extend(piece)
        if not self.text.endswith(REPLACEMENT):
            self._held.clear()

    def clear(self) -> None:
        """Forget what is held: it was handed over."""
        self._held.clear()
