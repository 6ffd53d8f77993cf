"""The tokenizer of a checkpoint, and the ids with a meaning of their own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import deepseek_recipe
import tokenizers

from dsuf.errors import CheckpointError, InvalidRequest

IMAGE_TOKEN = "<｜deepseek_image｜>"  # the release spells it so; the library's default is another
_NEEDED = ("Bos", "Eos", "ThinkingStart", "ThinkingEnd", "System", "User", "Assistant", "LatestReminder", "Dsml")


@dataclass(frozen=True, repr=False)  # a repr of all tokens would take longer than a step
class Vocabulary:
    """A loaded tokenizer.

    `specials` maps the spelling of each added token to its id; `size` is one more than the largest id; no token stands
    for more than `longest_token` characters.
    """

    tokenizer: deepseek_recipe.Tokenizer
    plain: tokenizers.Tokenizer
    special_tokens: deepseek_recipe.SpecialTokens
    encoding: deepseek_recipe.DeepseekV41Encoding
    specials: dict[str, int]
    eos_id: int
    dsml_id: int
    thinking_end_id: int
    size: int
    longest_token: int
    _open_ends: dict[int, bool] = field(default_factory=dict, repr=False)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, where the spelling of a special token becomes that token (prompts are not made this way)."""
        return self.tokenizer.encode(text)

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` in which the spellings of special tokens stay text: they are encoded in two pieces."""
        ids = self.encode(text)
        if self._special_ids.isdisjoint(ids):
            return ids
        found = self._spellings.search(text)
        assert found is not None, "a special token without its spelling"
        place = found.start() + 1
        return self.encode(text[:place]) + self.encode_text(text[place:])

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raise `InvalidRequest` if one of `ids`, sent as `param`, is no token."""
        strangers = [token for token in ids if not 0 <= token < self.size]
        if strangers:
            raise InvalidRequest(f"token {strangers[0]} is not in the vocabulary of {self.size}", param=param)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.specials.values())

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(spelling) for spelling in self.specials))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; ids outside the vocabulary have none."""
        return str(self.plain.decode(list(ids), skip_special_tokens=False))

    def ends_open(self, token: int) -> bool:
        """Whether the bytes of `token` end within a character (or are one that stands for such bytes)."""
        known = self._open_ends.get(token)
        if known is None:
            known = self._open_ends[token] = self.decode((token,)).endswith("\ufffd")
        return known


def load_vocabulary(directory: Path) -> Vocabulary:
    """Load `tokenizer.json` of a checkpoint; raises `CheckpointError` if it is missing, damaged or lacks a token."""
    path = directory / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"tokenizer: cannot read {path}: {error}") from error
    return parse_vocabulary(text)


def parse_vocabulary(text: str) -> Vocabulary:
    """A vocabulary from the contents of a `tokenizer.json`; raises `CheckpointError`."""
    try:
        plain = tokenizers.Tokenizer.from_str(text)
        tokenizer = deepseek_recipe.Tokenizer.from_str(text)
    except Exception as error:  # both libraries raise plain `Exception` or `RuntimeError` for a damaged file
        raise CheckpointError(f"tokenizer: not a tokenizer.json: {error}") from error
    special_tokens = deepseek_recipe.SpecialTokens(image=IMAGE_TOKEN)
    specials = {token.content: id_ for id_, token in plain.get_added_tokens_decoder().items()}
    _check_specials(specials, special_tokens)
    entries = plain.get_vocab(with_added_tokens=True)
    return Vocabulary(
        tokenizer=tokenizer,
        plain=plain,
        special_tokens=special_tokens,
        encoding=deepseek_recipe.DeepseekV41Encoding().with_special_tokens(special_tokens).with_tokenizer(tokenizer),
        specials=specials,
        eos_id=specials[special_tokens.token(deepseek_recipe.SpecialToken.Eos)],
        dsml_id=specials[special_tokens.token(deepseek_recipe.SpecialToken.Dsml)],
        thinking_end_id=specials[special_tokens.token(deepseek_recipe.SpecialToken.ThinkingEnd)],
        size=max(entries.values()) + 1,
        # Entries spell bytes as characters, of which a character of text has at least one.
        longest_token=max(map(len, entries)),
    )


def _check_specials(specials: dict[str, int], spelling: deepseek_recipe.SpecialTokens) -> None:
    """Refuse a tokenizer that cannot encode what the renderer writes; otherwise the first request would find out."""
    tokens = [getattr(deepseek_recipe.SpecialToken, name) for name in _NEEDED]
    missing = [spelling.token(token) for token in tokens if spelling.token(token) not in specials]
    if missing:
        raise CheckpointError(f"tokenizer: the added vocabulary lacks {', '.join(missing)}")
