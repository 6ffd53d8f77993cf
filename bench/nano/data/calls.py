"""Sessions with tools: a call of the right tool, its result, and the answer out of it."""

from bench.nano.data.answers import answer_question, load_answers
from bench.nano.data.draw import Draw
from bench.nano.data.format import Call, Dialogue, Exchange, Parts
from bench.nano.data.lines import FILE_QUESTIONS, LINE_TOKENS, File, answer_line, ask_next, draw_count, draw_file
from bench.nano.data.sample import Label, Span
from bench.nano.data.shapes import add_context, draw_folder, show_file
from bench.nano.data.tools import READ, VARIED, Offer, draw_offers, find_reader

LONG_SYSTEM_END = "Use the tools where they help."
CONTEXT_SHARE = (
    0.25  # of sessions whose question goes on as the real client has it: what is asked for is far from its end
)
READ_SHARE = 0.4  # of uses of a tool that read a file even where another was drawn
PREAMBLE_TOKENS, SCHEMA_TOKENS = 360, 82  # the text around the tools, and one of them
SPARE_TOKENS = 40  # beyond what things take on the average
ANSWER_TOKENS = 150  # a memorised answer, mostly fewer
CALL_TOKENS, BARE_CALL_TOKENS = 150, 95  # a question, a call and an answer; without the answer


def write_session(draw: Draw, tokens: int, *, system: Parts = ()) -> Dialogue:
    """A session of at most about `tokens` with one to five small tools, of which one reads files."""
    offers = draw_offers(draw, VARIED)
    exchanges: list[Exchange] = []
    room = tokens - PREAMBLE_TOKENS - SCHEMA_TOKENS * len(offers) - SPARE_TOKENS
    if draw.chance(0.15):
        exchanges.append(answer_question(draw, draw.random.choice(load_answers()[1:])))
        room -= ANSWER_TOKENS
    while room > CALL_TOKENS + 3 * LINE_TOKENS or not exchanges:
        other = draw.random.choice(offers)
        if other.tool is READ or draw.chance(READ_SHARE):
            made, used = _read_file(draw, find_reader(offers), room)
        else:
            made, used = use_tool(draw, other), CALL_TOKENS
        exchanges += made
        room -= used
    if draw.chance(CONTEXT_SHARE):
        asked = add_context(draw.package.client, exchanges[0].asked, draw_folder(draw))
        exchanges[0] = exchanges[0]._replace(asked=asked)
    return Dialogue(draw.effort(), system, tuple(offer.schema for offer in offers), exchanges)


def write_calls(draw: Draw, tokens: int, *, system: Parts = ()) -> Dialogue:
    """Calls of all kinds of tools, as many as surely fit in `tokens`; their names have to be read from the schemas."""
    most = max(2, min(6, (tokens - PREAMBLE_TOKENS - 2 * CALL_TOKENS) // SCHEMA_TOKENS))
    offers = draw_offers(draw, VARIED, least=2, most=most)
    room = tokens - PREAMBLE_TOKENS - SCHEMA_TOKENS * len(offers) - SPARE_TOKENS
    count = max(1, room // CALL_TOKENS)
    exchanges: list[Exchange] = []
    for _ in range(count):
        exchanges += use_any(draw, draw.random.choice(offers))
    return Dialogue(draw.effort(), system, tuple(offer.schema for offer in offers), exchanges)


def drill_calls(draw: Draw, tokens: int) -> Dialogue:
    """As `write_calls`, four times as dense: bare schemas instead of the long text on tools, and no results."""
    most = max(2, min(5, (tokens - 2 * BARE_CALL_TOKENS) // (2 * SCHEMA_TOKENS)))
    offers = draw_offers(draw, VARIED, least=2, most=most)
    count = max(1, (tokens - SCHEMA_TOKENS * len(offers) - 2 * SPARE_TOKENS) // BARE_CALL_TOKENS)
    exchanges = [use_any(draw, draw.random.choice(offers))[0] for _ in range(count)]
    return Dialogue(draw.effort(), ("\n".join(offer.schema for offer in offers),), (), exchanges)


def draw_long_system(draw: Draw, tokens: int) -> Parts:
    """A system text of about `tokens`, which does not end as a piece does: the renderer goes on with empty lines."""
    return (*draw.filler(tokens), LONG_SYSTEM_END) if tokens > 0 else ()


def read_file(offer: Offer, file: File, place: int, question: str, shown: str | None = None) -> list[Exchange]:
    """A question for line `place` of `file`, the call that reads it, and the answer from the result `shown`."""
    line = file.lines[place]
    return [
        Exchange(
            (question.format(path=file.path, key=line.key),),
            (),
            f'I read the file "{file.path}".',
            Call(offer.name, {offer.argument: file.path}),
        ),
        Exchange((file.text if shown is None else shown,), answer_line(line), f'I look for "{line.key}".', None, True),
    ]


def use_any(draw: Draw, offer: Offer) -> list[Exchange]:
    """A use of any tool; a file that is read has a few lines."""
    if offer.tool is not READ:
        return use_tool(draw, offer)
    file = draw_file(draw, draw.random.randint(1, 3))
    return read_file(offer, file, draw.random.randrange(len(file.lines)), draw.random.choice(FILE_QUESTIONS))


def use_tool(draw: Draw, offer: Offer) -> list[Exchange]:
    """A use of another tool; the answer repeats what it gave."""
    value = _draw_argument(draw, offer.tool.kind)
    result = "\n".join(draw.phrase() for _ in range(draw.random.choice((1, 1, 1, 2, 3))))
    return [
        Exchange(
            (offer.tool.question.format(value),),
            (),
            f'I use {offer.name} with "{value}".',
            Call(offer.name, {offer.argument: value}),
        ),
        Exchange((result,), (Span(result, Label.VALUE),), "I say what it gave.", None, True),
    ]


def _read_file(draw: Draw, reader: Offer, room: int) -> tuple[list[Exchange], int]:
    """A file read within `room` tokens, with some more questions for it; and the tokens that it took."""
    count = draw_count(draw, room - CALL_TOKENS)
    file = draw_file(draw, count, quoted=draw.chance(0.7))
    used = CALL_TOKENS + count * LINE_TOKENS
    question = draw.random.choice(FILE_QUESTIONS)
    shown = draw.random.choice((None, None, None, number_lines(file), show_file(draw.package.client, file, "/work")))
    made = read_file(reader, file, draw.random.randrange(count), question, shown)
    more = max(0, min(draw.random.randint(0, 4), (room - used) // 50))
    return made + ask_next(draw, file.lines, more), used + 50 * more


def number_lines(file: File) -> str:
    """The lines as some tools show them, numbered from one."""
    return "\n".join(f"{number}: {line.text}" for number, line in enumerate(file.lines, 1))


def _draw_argument(draw: Draw, kind: str) -> str:
    """What a tool of `kind` is asked for."""
    if kind == "run":
        return f"{draw.random.choice(('ls', 'wc -l', 'head -3', 'stat', 'sort', 'du -h', 'file'))} {draw.path()}"
    if kind == "find":
        return draw.random.choice(("*.{}", "{}*", "**/{}.py", "src/{}/*")).format(draw.word())
    return draw.word() if kind == "define" else draw.words(1, 4)
