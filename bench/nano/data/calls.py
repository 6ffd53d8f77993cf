"""Sessions with tools: a call of the right tool, its result, and the answer out of it."""

import json
from typing import NamedTuple

from bench.nano.data.answers import answer_question, load_answers
from bench.nano.data.draw import Draw
from bench.nano.data.format import Call, Dialogue, Exchange, Parts
from bench.nano.data.lines import FILE_QUESTIONS, LINE_TOKENS, File, answer_line, ask_next, draw_count, draw_file
from bench.nano.data.sample import Label, Span
from bench.nano.data.shapes import add_context, draw_folder, show_file

LONG_SYSTEM_END = "Use the tools where they help."
CONTEXT_SHARE = (
    0.25  # of sessions whose question goes on as the real client has it: what is asked for is far from its end
)
ANSWER_TOKENS = 150  # a memorised answer, mostly fewer
CALL_TOKENS = 150  # a question, a call and an answer


class Tool(NamedTuple):
    """A kind of tool: names and names of its one argument that it goes by, and how it is asked for."""

    kind: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    does: str
    question: str = ""


READ = Tool("read", ("read", "read_file", "open_file", "view_file", "cat"), ("path", "file_path", "file", "filename"),
            "Read a text file and return its lines.")  # fmt: skip
OTHERS = (
    Tool("run", ("bash", "run", "shell", "execute"), ("command", "cmd"), "Run a shell command and return its output.",
         'Run the command "{}".'),
    Tool("find", ("glob", "find_files", "list_files"), ("pattern",), "Find files whose paths match a pattern.",
         'Which files match "{}"?'),
    Tool("grep", ("grep", "search_text"), ("pattern", "text"), "Search file contents.", 'Which lines contain "{}"?'),
    Tool("weather", ("get_weather", "weather"), ("city", "place"), "The weather of a place now.",
         'What is the weather in "{}"?'),
    Tool("web", ("web_search", "search"), ("query", "q"), "Search the web.", 'Search the web for "{}".'),
    Tool("define", ("define", "dictionary"), ("word", "term"), "Look a word up.", 'Look up the word "{}".'),
    Tool("note", ("save_note", "remember"), ("text", "note"), "Keep a note.", 'Save the note "{}".'),
)  # fmt: skip


class Offer(NamedTuple):
    """A tool as this session has it."""

    tool: Tool
    name: str
    argument: str

    @property
    def schema(self) -> str:
        """The schema as the prompt shows it."""
        properties = {self.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        return json.dumps({"name": self.name, "description": self.tool.does, "parameters": parameters})


def write_session(draw: Draw, tokens: int, *, system: Parts = ()) -> Dialogue:
    """A session of at most about `tokens` with one to five small tools, of which one reads files."""
    offers = draw_offers(draw)
    exchanges: list[Exchange] = []
    room = tokens - 330 - 60 * len(offers)
    if draw.chance(0.15):
        exchanges.append(answer_question(draw, draw.random.choice(load_answers()[1:])))
        room -= ANSWER_TOKENS
    while room > CALL_TOKENS + 3 * LINE_TOKENS or not exchanges:
        other = draw.random.choice(offers)
        if other.tool is READ or draw.chance(0.6):
            made, used = _read_file(draw, _find_reader(offers), room)
        else:
            made, used = use_tool(draw, other), CALL_TOKENS
        exchanges += made
        room -= used
    if draw.chance(CONTEXT_SHARE):
        asked = add_context(draw.package.client, exchanges[0].asked, draw_folder(draw))
        exchanges[0] = exchanges[0]._replace(asked=asked)
    return Dialogue(draw.effort(), system, tuple(offer.schema for offer in offers), exchanges)


def draw_long_system(draw: Draw, tokens: int) -> Parts:
    """A system text of about `tokens`, which does not end as a piece does: the renderer goes on with empty lines."""
    return (*draw.filler(tokens), LONG_SYSTEM_END) if tokens > 0 else ()


def draw_offers(draw: Draw) -> list[Offer]:
    """One to five tools in any order; one of them reads files."""
    kinds = [READ, *draw.random.sample(OTHERS, draw.random.randint(0, 4))]
    draw.random.shuffle(kinds)
    return [Offer(tool, draw.random.choice(tool.names), draw.random.choice(tool.arguments)) for tool in kinds]


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


def _find_reader(offers: list[Offer]) -> Offer:
    return next(offer for offer in offers if offer.tool is READ)


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
