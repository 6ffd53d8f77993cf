"""A small package of training data out of the repository alone: for tests, and for models of a few thousand weights."""

import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.nano.data.package import Client, Package, Words
from bench.nano.data.sample import Piece
from dsuf.checkpoint.vocabulary_cut import cut_tokenizer

ROOT = Path(__file__).parents[3]
RELEASED = ROOT / "dsuf" / "checkpoint" / "released"
TOKENS = 512
EFFORT_NOTE = "Effort: 75\n\n"  # stands for the renderer's
PREAMBLE = ("\n\nTools are called in a <｜DSML｜ calls> block. They are:\n\n", "\n\nUse only these.\n")
CLIENT = Client(
    system="You are a client.",
    tools=('{"name": "read", "description": "Read a file.", "parameters": {"type": "object"}}',),
    context="\n\nYou are in {folder}.",
    title_system="Make a title.",
    title_question="It begins with {question}",
    read_result="{folder}/{file}\n{lines}({count} lines)",
)


def make_toy_package(tokens: int = TOKENS) -> Package:
    """A package with a tokenizer of `tokens` entries whose filler and words are those of the readme."""
    tokenizer_text = cut_tokenizer(RELEASED / "tokenizer.json", tokens).decode()
    tokenizer = Tokenizer.from_str(tokenizer_text)
    readme = (ROOT / "README.md").read_text()
    texts = [f"{text.strip()}\n\n" for text in re.split(r"\n\n+", readme) if 40 < len(text) < 600]
    pieces = tuple(Piece(np.array(item.ids, np.uint16)) for item in tokenizer.encode_batch(texts))
    words = sorted(set(re.findall(r"\b[a-z]{3,9}\b", readme)))
    return Package(
        tokenizer_text=tokenizer_text,
        effort_note=EFFORT_NOTE,
        tools_preamble=PREAMBLE,
        client=CLIENT,
        words=Words(tuple(words[:-40]), tuple(words[-40:])),
        filler=pieces[:-8],
        held_filler=pieces[-8:],
    )
