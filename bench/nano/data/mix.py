"""Which samples a batch is made of, and how they are packed: whole conversations one after the other, no mask between.

All shapes hold the same number of tokens, so that one compilation serves them. The shares come from trials: dense
supervision in short sequences, the page known by heart in two of five middle ones, long texts and the real client's
sessions in the long ones.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.nano.data import answers, calls, drills, lines, needles, objects, sessions, talks
from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, write_sample
from bench.nano.data.package import Package
from bench.nano.data.sample import Piece, Sample

Bucket = Literal["recall", "short", "middle", "long"]
BUCKETS: dict[Bucket, tuple[int, int]] = {
    "recall": (30, 1024),
    "short": (30, 1024),
    "middle": (10, 3072),
    "long": (3, 10240),
}
TOY_BUCKETS: dict[Bucket, tuple[int, int]] = {
    "recall": (4, 64),
    "short": (2, 128),
    "middle": (2, 256),
    "long": (1, 512),
}
RECALL_TOKENS = 256  # of a stretch in which what is asked for has just been said; a row of "recall" holds several
LEAST_TOKENS = 96  # of a sample; what is left of a row at its end is filler
TRIES = 6  # samples drawn for what is left of a row before filler takes it

Write = Callable[[Draw, int], Sample | Dialogue]
SHORT: dict[Write, float] = {
    needles.write_needles: 28,
    needles.write_turns: 6,
    lines.write_list: 10,
    calls.write_session: 24,
    calls.write_calls: 12,
    calls.drill_calls: 10,
    lambda draw, tokens: objects.write_objects(draw, max(1, min(4, tokens // 150))): 8,
    talks.write_talk: 16,
    lambda draw, tokens: drills.write_repeats(draw, max(1, min(4, tokens // 120))): 4,
    lambda draw, tokens: sessions.write_title(draw): 1,
    drills.copy_list: 7,
    lambda draw, tokens: drills.repeat_random(draw, min(tokens, RECALL_TOKENS)): 5,
    drills.read_text: 3,
}
MIDDLE: dict[Write, float] = {
    needles.write_needles: 40,
    needles.write_turns: 15,
    lambda draw, tokens: _write_session_behind(draw, tokens, tokens - 900): 30,
    talks.write_talk: 15,
}
LONG: dict[Write, float] = {
    needles.write_needles: 40,
    needles.write_turns: 10,
    lambda draw, tokens: _write_session_behind(draw, tokens, min(6500, tokens - 1500)): 15,
}
HEADLINE_SHARE, HEADLINE_TOKENS = 0.3, 2700
CLIENT_SHARE = 0.4


class Batch(NamedTuple):
    """Ids [rows, length] int32; of the id after each place its loss weight, float32, and its label, uint8.

    The last column of weights and labels is zero, since nothing follows.
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    labels: NDArray[np.uint8]


def make_batch(package: Package, seed: int, bucket: Bucket, number: int, *, toy: bool = False) -> Batch:
    """Batch `number` of `bucket`: the same arguments give the same batch."""
    shape = rows, length = (TOY_BUCKETS if toy else BUCKETS)[bucket]
    if bucket == "recall" and length > RECALL_TOKENS:
        rows, length = rows * length // RECALL_TOKENS, RECALL_TOKENS
    made = [_make_row(package, f"{seed}/{bucket}/{number}/{row}", bucket, length) for row in range(rows)]
    ids, weights, labels = (np.stack(parts).reshape(shape) for parts in zip(*made, strict=True))
    return Batch(ids, _shift(weights), _shift(labels))


def _shift(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """What belongs to an id, at the place of the one before."""
    shifted = np.zeros_like(values)
    shifted[:, :-1] = values[:, 1:]
    return shifted


def _make_row(package: Package, seed: str, bucket: Bucket, length: int) -> Sample:
    """Samples up to `length` tokens."""
    draw = Draw(package, seed)
    samples: list[Sample] = []
    room = length
    while room > 0:
        samples.append(_fit_sample(draw, bucket, room, first=not samples))
        room -= len(samples[-1].ids)
    return Sample(*(np.concatenate(parts) for parts in zip(*samples, strict=True)))


def _fit_sample(draw: Draw, bucket: Bucket, room: int, *, first: bool) -> Sample:
    """A sample of at most `room` tokens; filler where none fits."""
    if room >= LEAST_TOKENS:
        for _ in range(TRIES):
            made = _draw_sample(draw, bucket, room, first=first)
            sample = made if isinstance(made, Sample) else write_sample(draw.package, made)
            if len(sample.ids) <= room:
                return sample
    return drills.repeat_random(draw, room) if bucket == "recall" else drills.read_text(draw, room)


def _draw_sample(draw: Draw, bucket: Bucket, room: int, *, first: bool) -> Sample | Dialogue:
    """A sample of the kinds of `bucket` that takes about `room` tokens or fewer."""
    if bucket == "recall":
        return drills.recall_facts(draw, room) if not first or draw.chance(0.5) else drills.repeat_random(draw, room)
    if bucket == "middle" and first and room > HEADLINE_TOKENS and draw.chance(HEADLINE_SHARE):
        return talks.write_headline(draw)
    if bucket == "long" and first and room > sessions.PROMPT_TOKENS + 600 and draw.chance(CLIENT_SHARE):
        return sessions.write_client_session(draw, room, list(answers.load_answers()))
    shares = {"middle": MIDDLE, "long": LONG}.get(bucket, SHORT) if room > 1500 else SHORT
    write = draw.random.choices(list(shares), list(shares.values()))[0]
    return write(draw, room)


def _write_session_behind(draw: Draw, tokens: int, most: int) -> Dialogue:
    """A session with tools behind a long system text of up to `most` tokens."""
    system = calls.draw_long_system(draw, draw.random.randint(0, max(0, most)))
    used = sum(len(part.ids) for part in system if isinstance(part, Piece))
    write = calls.write_calls if draw.chance(0.4) else calls.write_session
    return write(draw, min(tokens - used, 2500), system=system)
