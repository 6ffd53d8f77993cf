"""The smaller vocabulary under which Engram hashes: tokens alike but for case, accents or spacing share an id.

It follows from the tokenizer alone, so no checkpoint stores it.
"""

from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import NFD, NFKC, Lowercase, Replace, Sequence, Strip, StripAccents

from dsuf.errors import CheckpointError

_LONE_SPACE = "\ue000"  # private use: stands for a text that is only a space, which Strip would delete
_normalizer = Sequence([
    NFKC(), NFD(), StripAccents(), Lowercase(), Replace(Regex("[ \t\r\n]+"), " "), Replace(Regex("^ $"), _LONE_SPACE),
    Strip(), Replace(_LONE_SPACE, " "),
])  # fmt: skip


class TokenMap(msgspec.Struct, frozen=True):
    """`ids` [vocabulary] int64: the Engram id of each token; they run from 0 to `size` - 1."""

    ids: NDArray[np.int64]
    size: int

    @classmethod
    def from_tokenizer(cls, path: Path) -> Self:
        """The map of the tokenizer in `path`, a `tokenizer.json`; raises `CheckpointError` if it cannot be read.

        Takes under a second at 129,280 tokens.
        """
        seen: dict[str, int] = {}
        ids = [seen.setdefault(key, len(seen)) for key in _keys(load_tokenizer(path))]
        return cls(np.array(ids, np.int64), len(seen))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in `path`; raises `CheckpointError` with one line if it cannot be read."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise CheckpointError(f"{path}: cannot read the tokenizer: {' '.join(str(error).split())[:200]}") from error


def _keys(tokenizer: Tokenizer) -> list[str]:
    """What each token is known by: its normalised text, or its raw name where its bytes are not whole characters."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    return [
        tokenizer.id_to_token(token) or "" if "\ufffd" in text else _normalizer.normalize_str(text) or text
        for token, text in enumerate(texts)
    ]
