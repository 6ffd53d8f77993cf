"""Makes the package of training data: `python -m bench.nano.pack OUT.npz`.

Needs the product's environment, the Debian packages of `bench.nano.data.sources`, and the real client's wheel. Exit
codes: 0 written, 1 something is missing, 2 wrong use.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.nano.data import sources
from bench.nano.data.client import capture_client
from bench.nano.data.package import Package
from bench.nano.data.sample import Piece
from dsuf.checkpoint.vocabulary_cut import cut_tokenizer
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import Vocabulary, parse_vocabulary
from tests.clients.dsh import InstallError

RELEASED = Path(__file__).parents[2] / "dsuf" / "checkpoint" / "released"
VOCABULARY_TOKENS = 4096
# What stands around the parts that a probe leaves to the renderer.
PROBE_TOOL = {"name": "x", "description": "y", "parameters": {"type": "object", "properties": {}}}


def make_package() -> Package:
    """Everything from its sources; raises `InstallError` or `OSError` where one is missing."""
    tokenizer_text = cut_tokenizer(RELEASED / "tokenizer.json", VOCABULARY_TOKENS).decode()
    tokenizer = Tokenizer.from_str(tokenizer_text)
    effort_note, preamble = probe_renderer(parse_vocabulary(tokenizer_text))
    training, held = sources.read_pieces()
    return Package(
        tokenizer_text=tokenizer_text,
        effort_note=effort_note,
        tools_preamble=preamble,
        client=capture_client(),
        words=sources.read_words(),
        filler=encode_pieces(tokenizer, training),
        held_filler=encode_pieces(tokenizer, held),
    )


def encode_pieces(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Piece, ...]:
    """Each text as ids."""
    coded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return tuple(Piece(np.array(item.ids, np.uint16)) for item in coded)


def probe_renderer(vocabulary: Vocabulary) -> tuple[str, tuple[str, str]]:
    """What the official renderer writes by itself: the note on effort, and the text before and after the tools."""
    bare = _render(vocabulary, {})
    effort_note = bare.split("<｜System｜>")[1].split("<｜User｜>")[0]
    full = _render(vocabulary, {"tools": [{"type": "function", "function": PROBE_TOOL}]})
    head = full.split("<｜System｜>" + effort_note)[1].split("<｜User｜>")[0]
    before, after = head.split(json.dumps(PROBE_TOOL))
    return effort_note, (before, after)


def _render(vocabulary: Vocabulary, extra: dict[str, object]) -> str:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "z"}]} | extra
    return vocabulary.decode(count_prompt("chat", json.dumps(body).encode(), vocabulary))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if missing := sources.find_missing():
        print(f"pack: {missing[0]} is missing: {sources.INSTALL}", file=sys.stderr)
        return 1
    try:
        package = make_package()
    except InstallError as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    package.save(args.out)
    tokens = sum(len(piece.ids) for piece in package.filler)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes, {len(package.filler):,} pieces of {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
