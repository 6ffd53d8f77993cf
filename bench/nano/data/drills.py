"""What makes recall grow before anything else: random tokens that repeat, facts right before their questions, lists."""

import numpy as np

from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, Exchange, write_sample
from bench.nano.data.needles import QUESTION_TOKENS, ask_fact, draw_fact
from bench.nano.data.sample import Label, Piece, Sample, Span, Writer

PERIODS = (8, 85)  # tokens after which random ones repeat
COPY_WEIGHT, ANSWER_WEIGHT = 0.9, 0.3  # in the recall stage; values weigh 1
FIRST_TOKEN = 3  # the ids before are special
SEPARATORS = ("\n", " ", ", ", '" "', "\n- ", ": ")
TEXT_QUESTION, TEXT_REASONING = 'Repeat exactly: "{}"', "I repeat the text."


def repeat_random(draw: Draw, tokens: int) -> Sample:
    """Random ids that repeat after a random period."""
    period = min(draw.random.randint(*PERIODS), tokens // 2)
    generator = np.random.default_rng(draw.random.getrandbits(63))
    last = draw.package.special["<｜System｜>"]  # the first of the ids that no merge made
    once = generator.integers(FIRST_TOKEN, last, period, dtype=np.int32)
    ids = np.resize(once, tokens)
    labels = np.full(tokens, Label.COPY, np.uint8)
    labels[:period] = Label.NONE
    return Sample(ids, (labels == Label.COPY).astype(np.float32) * COPY_WEIGHT, labels)


def recall_facts(draw: Draw, tokens: int) -> Sample:
    """One to four facts and a question for each of them, in another order."""
    count = draw.random.randint(1, max(1, min(4, tokens // 64)))
    facts = [draw_fact(draw) for _ in range(count)]
    told = "".join(f"{fact.sentence}\n" for fact in facts)
    draw.random.shuffle(facts)
    exchanges = [ask_fact(fact, (told,) if number == 0 else ()) for number, fact in enumerate(facts)]
    sample = write_sample(draw.package, Dialogue(draw.effort(), (), (), exchanges))
    weights = np.where(sample.labels == Label.ANSWER, ANSWER_WEIGHT, sample.weights).astype(np.float32)
    return sample._replace(weights=weights)


def fits_facts(tokens: int) -> bool:
    """Whether the shortest `recall_facts` fits."""
    return tokens >= 2 * QUESTION_TOKENS + 20


def copy_list(draw: Draw, tokens: int) -> Sample:
    """A list of words two or three times, each time with another separator: the same words with and without a space."""
    times = draw.random.choice((2, 2, 3))
    words = [draw.word() for _ in range(max(2, min(draw.random.randint(4, 60), tokens // (5 * times))))]
    separators = draw.random.sample(SEPARATORS, times)
    writer = Writer(draw.package.tokenizer)
    writer.add_special(draw.package.special["<｜begin▁of▁sentence｜>"])
    for number, separator in enumerate(separators):
        writer.add(Span(separator.join(words) + "\n\n", Label.COPY if number else Label.NONE))
    return writer.finish()


def write_repeats(draw: Draw, count: int) -> Dialogue:
    """Requests to repeat some words."""
    return Dialogue(draw.effort(), (), (), [ask_repeat(draw) for _ in range(count)])


def ask_repeat(draw: Draw) -> Exchange:
    """A request to repeat one to twelve words."""
    text = draw.words(1, 12)
    return Exchange((TEXT_QUESTION.format(text),), (Span(text, Label.ANSWER),), TEXT_REASONING)


def read_text(draw: Draw, tokens: int) -> Sample:
    """Plain filler of exactly `tokens` ids (a piece may be cut)."""
    writer = Writer(draw.package.tokenizer)
    writer.add_special(draw.package.special["<｜begin▁of▁sentence｜>"])
    longest = max(len(piece.ids) for piece in draw.package.filler)
    for piece in draw.filler(tokens + longest):
        writer.add(Piece(piece.ids))
    sample = writer.finish()
    return Sample(*(np.resize(part, tokens) if len(part) < tokens else part[:tokens] for part in sample))
