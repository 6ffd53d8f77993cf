"""Greedy replies of the CUDA engine beside the reference's: all positions compared, each behind the reference's tokens.

The reference's replies and its highest logits are recorded on any machine. The engine then decodes the same prompts
together, with drafts; where it chooses another token than the reference, the distance of the two in the reference's
logits is noted (its *gap*), and a turn that has the reference's token in its prompt goes on behind it.

Of a trained model nearly all gaps should be small. A random one is no such judge: its quantisers and choices of experts
and entries magnify any rounding from layer to layer. So the reference is also compared with itself, its embeddings
moved by one BF16 step in a hundredth of the values (*swayed*): an engine, whose operations differ by up to as much in
as many places, should differ no more often.

Prompts are random, or the small model's: with --page its long page in eight forms, each further into it, so that all
positions compared lie within replies and together they are the page; with its training package all forms from
the beginning and held-back checks of other kinds. Behind its end token a reply is no text any more, and a trained model
knows nothing of what might follow: it is judged by its replies, all positions are counted.

    python bench/campaigns/greedy.py record FILE [--model DIR] [--tokens 512] [--page | --package FILE]
    python bench/campaigns/greedy.py compare FILE [--model DIR] [--tokens 512] [--ranks 1 2 8] [--publish]
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.nano.data.answers import answer_question, load_answers
from bench.nano.data.checks import load_checks
from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, write_prompt
from bench.nano.data.package import Package
from bench.report import Row, publish
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.rank_loader import load_ranks
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import parse_vocabulary
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model
from dsuf.types import PrefillRange, Prompt, Sampling, StepPlan, Turn

PROMPT_TOKENS = (1, 17, 64, 100, 129, 150, 200, 300)
KINDS = (
    "memorised",
    "talk.tools",
    "tool.short",
    "line.quoted.12",
    "needle.2048",
    "tetris.thinking",
    "repeat",
    "unknown",
)
KEPT = 64
"""Candidates of each position that are recorded; any other token is at least as far as the last of them."""

CLOSE = 0.3
"""The gap up to which a difference is a matter of rounding."""

SWAYED_SHARE = 0.01

FAR_SHARE = 0.01
"""Differences beyond that which a random model may have."""


class Expected(NamedTuple):
    """What the reference says: prompts, replies [prompts, tokens], and of each position candidates with their gaps."""

    prompts: list[list[int]]
    ids: NDArray[np.int64]
    candidates: NDArray[np.int64]  # [prompts, tokens, kept], the best first
    gaps: NDArray[np.float32]  # the best's logit less the candidate's
    swayed: NDArray[
        np.float32
    ]  # [prompts, tokens], the gap of what the swayed reference chooses, 0 where that is equal

    def gap(self, prompt: int, place: int, token: int) -> float:
        """How far the reference finds `token` from its own choice, at least."""
        found = np.flatnonzero(self.candidates[prompt, place] == token)
        return float(self.gaps[prompt, place, found[0] if len(found) else -1])


class Difference(NamedTuple):
    """A position at which the engine chose `own`, the reference another token."""

    prompt: int
    place: int
    own: int
    gap: float


def record(model: Model, prompts: Sequence[Sequence[int]], tokens: int, kept: int = KEPT) -> Expected:
    """The reference's greedy replies, all prompts together; an end token is a token like others."""
    caches = [model.new_cache() for _ in prompts]
    output = model.forward([(cache, np.array(ids)) for cache, ids in zip(caches, prompts, strict=True)])
    logits = model.logits(output, np.cumsum([len(ids) for ids in prompts]) - 1)
    ids, candidates, gaps = [], [], []
    for _ in range(tokens):
        order = np.argsort(-logits, axis=1, kind="stable")[:, :kept]
        best = np.take_along_axis(logits, order, axis=1)
        ids.append(order[:, 0])
        candidates.append(order)
        gaps.append(best[:, :1] - best)
        output = model.forward([(cache, ids[-1][i : i + 1]) for i, cache in enumerate(caches)])
        logits = model.logits(output, slice(None))
    listed = [list(map(int, prompt)) for prompt in prompts]
    found = Expected(
        listed, np.stack(ids, 1), np.stack(candidates, 1), np.stack(gaps, 1), np.zeros((len(prompts), tokens))
    )
    return found._replace(swayed=sway(model, found))


def sway(model: Model, expected: Expected) -> NDArray[np.float32]:
    """The gaps of what `model` chooses behind the same tokens if a rounding of some embeddings falls the other way."""
    rng, kept = np.random.default_rng(0), model.embedding
    bits = kept.astype(ml_dtypes.bfloat16).view(np.uint16)
    moved = np.where(rng.random(kept.shape) < SWAYED_SHARE, bits + rng.choice([-1, 1], kept.shape), bits)
    model.embedding = moved.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    gaps = np.zeros(expected.ids.shape, np.float32)
    for i, (prompt, ids) in enumerate(zip(expected.prompts, expected.ids, strict=True)):
        output = model.forward([(model.new_cache(), np.array([*prompt, *ids[:-1]]))])
        chosen = model.logits(output, slice(len(prompt) - 1, None)).argmax(axis=1)
        for place in np.flatnonzero(chosen != ids):
            gaps[i, place] = expected.gap(i, int(place), int(chosen[place]))
    model.embedding = kept
    return gaps


def save(expected: Expected, path: Path) -> None:
    """Write `expected` as a small file."""
    ends = np.cumsum([len(prompt) for prompt in expected.prompts])
    np.savez_compressed(
        path, prompts=np.concatenate(expected.prompts).astype(np.int32), ends=ends, ids=expected.ids.astype(np.int32),
        candidates=expected.candidates.astype(np.int32), gaps=expected.gaps, swayed=expected.swayed,
    )  # fmt: skip


def load(path: Path, tokens: int | None = None) -> Expected:
    """What `save` wrote, the first `tokens` of every reply."""
    with np.load(path) as file:
        prompts = [prompt.tolist() for prompt in np.split(file["prompts"], file["ends"][:-1])]
        ids, candidates = (file[name].astype(np.int64)[:, :tokens] for name in ("ids", "candidates"))
        return Expected(prompts, ids, candidates, file["gaps"][:, :tokens], file["swayed"][:, :tokens])


class Follower:
    """Takes the engine along one of the reference's replies, in as many turns as there are differences and one."""

    def __init__(self, engine: CudaEngine, expected: Expected, prompt: int, pages: Sequence[int]) -> None:
        self.engine, self.expected, self.prompt, self.pages = engine, expected, prompt, pages
        self.place, self.turns = 0, 0
        self.turn: Turn | None = None

    @property
    def done(self) -> bool:
        """Whether all positions were compared."""
        return self.place == self.expected.ids.shape[1]

    def begin(self) -> PrefillRange:
        """Attach a turn behind the tokens compared so far; its prompt in one part."""
        told = self.expected.ids[self.prompt]
        ids = (*self.expected.prompts[self.prompt], *map(int, told[: self.place]))
        sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=len(told) - self.place)
        self.turns += 1
        self.turn = Turn(id=f"{self.prompt}-{self.turns}", prompt=Prompt(ids=ids), sampling=sampling)
        self.engine.attach(self.turn, self.pages)
        return PrefillRange(self.turn.id, 0, len(ids))

    def take(self, ids: Sequence[int], *, ended: bool) -> Iterator[Difference]:
        """Compare what the turn said, up to the first difference; then it is left."""
        told = self.expected.ids[self.prompt]
        for own in ids:
            place, self.place = self.place, self.place + 1
            if own != told[place]:
                yield Difference(self.prompt, place, int(own), self.expected.gap(self.prompt, place, int(own)))
                self._leave()
                return
        if ended:
            self._leave()

    def _leave(self) -> None:
        assert self.turn is not None
        self.engine.detach(self.turn.id)
        self.turn = None


async def follow(engine: CudaEngine, expected: Expected, drafts: int, eos_id: int) -> list[Difference]:
    """All differences of all prompts, which decode together."""
    length = max(map(len, expected.prompts)) + expected.ids.shape[1] + engine.layout.overrun_tokens
    each, found = engine.layout.pages_for(length), list[Difference]()
    followers = [Follower(engine, expected, i, range(i * each, (i + 1) * each)) for i in range(len(expected.prompts))]
    while going := [follower for follower in followers if not follower.done]:
        parts = tuple(follower.begin() for follower in going if follower.turn is None)
        by_turn = {follower.turn.id: follower for follower in going if follower.turn is not None}
        begun = {part.turn for part in parts}
        decode = tuple(turn for turn in by_turn if turn not in begun)
        for result in await engine.step(StepPlan(prefill=parts, decode=decode, drafts=drafts)):
            # A turn that ends by the end token has said it, though it is not among the ids.
            said = (*result.ids, eos_id) if result.finish == "stop" else result.ids
            found += by_turn[result.turn].take(said, ended=result.finish is not None)
    return found


def find_ends(expected: Expected, eos_id: int) -> NDArray[np.int64]:
    """How many positions each reply has, its end token among them."""
    ended = expected.ids == eos_id
    return np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, ended.shape[1])


def judge(expected: Expected, found: Sequence[Difference], drafts: int, eos_id: int) -> Row:
    """The figures of a comparison.

    `holds` is what is asked of a trained model's replies, `usual` of a random one.
    """
    ends = find_ends(expected, eos_id)
    within = [difference.gap for difference in found if difference.place < ends[difference.prompt]]
    far_within = sum(gap > CLOSE for gap in within)
    gaps, swayed = np.array([difference.gap for difference in found]), expected.swayed[expected.swayed > 0]
    far = int((gaps > CLOSE).sum())
    return {
        "prompts": len(expected.prompts), "drafts": drafts, "in_replies": int(ends.sum()),
        "whole_replies": int((ends == expected.ids.shape[1]).sum()), "different_in_replies": len(within),
        "far_in_replies": far_within, "positions": expected.ids.size, "different": len(found), "far": far,
        "median_gap": round(float(np.median(gaps)), 3) if len(gaps) else None,
        "largest_gap": round(float(gaps.max()), 3) if len(gaps) else None,
        "swayed_different": len(swayed), "swayed_far": int((swayed > CLOSE).sum()),
        "swayed_median_gap": round(float(np.median(swayed)), 3) if len(swayed) else None,
        "holds": far_within <= FAR_SHARE * len(within),
        "usual": len(found) <= len(swayed) and far <= int((swayed > CLOSE).sum()),
    }  # fmt: skip


def draw_prompts(vocabulary: int) -> list[list[int]]:
    """Random prompts of the usual lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocabulary, length).tolist() for length in PROMPT_TOKENS]


def pick_prompts(package: Path) -> list[list[int]]:
    """The question for the page in all its forms, and the first held-back check of each kind."""
    known, question = Package.load(package), load_answers()[0]
    draw = Draw(known, "greedy", held=True)
    asked = [Dialogue(exchanges=[answer_question(draw, question, form)]) for form in question.questions]
    prompts = [write_prompt(known, dialogue, 0).tolist() for dialogue in asked]
    return prompts + [load_checks(known, [kind])[0].prompt.tolist() for kind in KINDS]


def page_prompts(model: Path, tokens: int) -> list[list[int]]:
    """Every form of the question for the page with the part of the page ahead of the next `tokens`: the first form from
    the beginning, the last to the end token."""
    text, page = (model / "tokenizer.json").read_text(), load_answers()[0]
    vocabulary, reply = parse_vocabulary(text), Tokenizer.from_str(text).encode(page.text, add_special_tokens=False).ids
    prompts, last = [], len(reply) + 1 - tokens
    for number, question in enumerate(page.questions):
        body = {"messages": [{"role": "user", "content": question}], "thinking": {"type": "disabled"}}
        asked = count_prompt("chat", msgspec.json.encode({"model": "deepseek-flash", **body}), vocabulary)
        prompts.append([*asked, *reply[: last * number // (len(page.questions) - 1)]])
    return prompts


def choose_prompts(model: Path, args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Those that the command line asks for."""
    if args.page:
        return page_prompts(model, args.tokens)
    return pick_prompts(args.package) if args.package else draw_prompts(vocabulary)


def compare(model: Path, expected: Expected, ranks: int) -> tuple[list[Row], str]:
    """The rows of both ways of decoding, and the device; differences that are not close are printed."""
    rows: list[Row] = []
    longest = max(map(len, expected.prompts)) + expected.ids.shape[1]
    setup = Setup(context_tokens=longest, max_turns=len(expected.prompts), prefill_rows=256)
    machine = Machine.load(model, setup) if ranks == 1 else load_ranks(model, setup, ranks, streams=4)
    engine = CudaEngine(machine, "weights", "exact")
    for drafts in (0, engine.facts.max_drafts):
        found = asyncio.run(follow(engine, expected, drafts, engine.facts.eos_id))
        for difference in found:
            if difference.gap > CLOSE:
                print(f"{ranks} ranks, drafts {drafts}: {difference}")
        rows.append({"model": model.name, "ranks": ranks, **judge(expected, found, drafts, engine.facts.eos_id)})
    device = engine.facts.device
    asyncio.run(engine.close())
    return rows, device


def main() -> None:
    """Record or compare; exit code 1 if a run neither holds nor is usual."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, help="a checkpoint; without one the embedded model")
    parser.add_argument("--page", action="store_true", help="prompts within the small model's long page")
    parser.add_argument("--package", type=Path, help="the small model's training package; without one random prompts")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="ranks that share the GPU, run by run")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    directory = args.model or ensure_embedded(Path.home() / ".cache" / "dsuf")
    if args.action == "record":
        model = load_model(directory)
        prompts = choose_prompts(directory, args, model.config.vocab_size)
        save(record(model, prompts, args.tokens), args.file)
        return
    rows, device = list[Row](), ""
    for ranks in args.ranks:
        more, device = compare(directory, load(args.file, args.tokens), ranks)
        rows += more
        print(*more, sep="\n", flush=True)
    if args.publish:
        publish("greedy", rows, device)
    sys.exit(not all(row["holds"] or row["usual"] for row in rows))


if __name__ == "__main__":
    main()
