"""The file that training reads, some megabytes, made by `bench.nano.pack`: nothing else has to travel."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.nano.data.sample import Piece


class Client(NamedTuple):
    """A real client's own words: system text, tool schemas, what it adds to a question, its request for a title.

    In `context` stands `{folder}` for the working folder, in `title_question` `{question}` for the JSON of the
    question, and in `read_result` `{folder}`, `{file}`, `{lines}` and `{count}`.
    """

    system: str
    tools: tuple[str, ...]
    context: str
    title_system: str
    title_question: str
    read_result: str


class Words(NamedTuple):
    """Lower-case words: what training may use, and what only checks use."""

    training: tuple[str, ...]
    held: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """See the fields of the file in `save`. `filler` and `held_filler` are pieces of text as ids.

    `effort_note` is what the renderer says before the system text when the model thinks (at effort 75);
    `tools_preamble` what it writes before and after the schemas of tools.
    """

    tokenizer_text: str
    effort_note: str
    tools_preamble: tuple[str, str]
    client: Client
    words: Words
    filler: tuple[Piece, ...]
    held_filler: tuple[Piece, ...]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `tokenizer_text`."""
        return Tokenizer.from_str(self.tokenizer_text)

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the added tokens by their spelling."""
        return {token.content: id_ for id_, token in self.tokenizer.get_added_tokens_decoder().items()}

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of `ids`, special tokens included."""
        return str(self.tokenizer.decode([int(id_) for id_ in ids], skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Write a compressed `.npz`: `texts` (UTF-8 JSON), `filler` (uint16 ids), `ends` of pieces, `held` of them."""
        pieces = [*self.filler, *self.held_filler]
        texts = {
            "tokenizer": self.tokenizer_text,
            "effort_note": self.effort_note,
            "tools_preamble": self.tools_preamble,
            "client": self.client._asdict(),
            "words": self.words._asdict(),
        }
        np.savez_compressed(
            path,
            texts=np.frombuffer(json.dumps(texts, ensure_ascii=False).encode(), np.uint8),
            filler=np.concatenate([piece.ids for piece in pieces]).astype(np.uint16),
            ends=np.cumsum([len(piece.ids) for piece in pieces]),
            held=np.array(len(self.held_filler)),
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises `OSError`, or `ValueError` or `KeyError` where it is no package."""
        with np.load(path) as stored:
            texts = json.loads(stored["texts"].tobytes())
            pieces = tuple(Piece(ids) for ids in np.split(stored["filler"], stored["ends"][:-1]))
            held = int(stored["held"])
        client, words = texts["client"], texts["words"]
        return cls(
            tokenizer_text=texts["tokenizer"],
            effort_note=texts["effort_note"],
            tools_preamble=(texts["tools_preamble"][0], texts["tools_preamble"][1]),
            client=Client(**client | {"tools": tuple(client["tools"])}),
            words=Words(tuple(words["training"]), tuple(words["held"])),
            filler=pieces[: len(pieces) - held],
            held_filler=pieces[len(pieces) - held :],
        )
