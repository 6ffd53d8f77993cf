"""Sessions of the real client: its system text, all its tools, what it adds to a question, and how it shows files."""

import json

from bench.nano.data.answers import Answer, answer_question
from bench.nano.data.calls import read_file
from bench.nano.data.draw import Draw
from bench.nano.data.format import Call, Dialogue, Exchange
from bench.nano.data.lines import FILE_QUESTIONS, LINE_TOKENS, ask_next, draw_count, draw_file
from bench.nano.data.package import Client
from bench.nano.data.sample import Label, Span
from bench.nano.data.shapes import add_context, draw_folder, show_file
from bench.nano.data.tools import READ, Offer

PROMPT_TOKENS = 8900  # of system text and tools
READER = Offer(READ, "read", "file_path", "")
# Uses of other tools: what is asked, and the call with its arguments in the order that the client wants.
OTHER_USES = (
    ('Run the command "{}".', "bash", ("description", "command")),
    ('Which files match "{}"?', "glob", ("pattern",)),
    ('Which lines contain "{}"?', "grep", ("pattern",)),
)
TITLE_READ, TITLE_OTHER = "A line of a file", "A short question"


def write_client_session(draw: Draw, tokens: int, answers: list[Answer]) -> Dialogue:
    """A session of at most about `tokens` that reads files, mostly; sometimes a memorised question comes first."""
    client, folder = draw.package.client, draw_folder(draw)
    exchanges: list[Exchange] = []
    room = tokens - PROMPT_TOKENS - 200
    if draw.chance(0.25):
        answer = draw.random.choice([answer for answer in answers if len(answer.text) < 1500])
        exchanges.append(answer_question(draw, answer))
        room -= len(answer.text) // 2 + 30
    while room > 260 or not exchanges:
        made, used = _use_tool(draw, folder, room)
        exchanges += made
        room -= used
    first = exchanges[0]
    exchanges[0] = first._replace(asked=add_context(client, first.asked, folder))
    return Dialogue(75 if draw.chance(0.8) else draw.effort(), (client.system,), client.tools, exchanges)


def ask_title(client: Client, question: str, title: str) -> Dialogue:
    """The request for a title that the client sends beside a first question."""
    asked = client.title_question.replace("{question}", json.dumps(question))
    return Dialogue(None, (client.title_system,), (), [Exchange((asked,), (Span(title, Label.MEMORISED),))])


def write_title(draw: Draw) -> Dialogue:
    """A request for a title: of a question for a line, or of anything else."""
    if draw.chance(0.6):
        question = draw.random.choice(FILE_QUESTIONS).format(path=draw.path(), key=draw.key())
        return ask_title(draw.package.client, question, TITLE_READ)
    return ask_title(draw.package.client, f"{draw.words(2, 6)}?", TITLE_OTHER)


def _use_tool(draw: Draw, folder: str, room: int) -> tuple[list[Exchange], int]:
    """One use of a tool within `room` tokens, and what it took."""
    if draw.chance(0.15):
        return _use_other(draw), 180
    count = draw_count(draw, room - 260)
    file = draw_file(draw, count, quoted=draw.chance(0.8))
    shown = show_file(draw.package.client, file, folder)
    question = draw.random.choice(FILE_QUESTIONS)
    made = read_file(READER, file, draw.random.randrange(count), question, shown)
    used = 230 + count * (LINE_TOKENS + 3)
    more = max(0, min(draw.random.randint(0, 3), (room - used) // 50))
    return made + ask_next(draw, file.lines, more), used + 50 * more


def _use_other(draw: Draw) -> list[Exchange]:
    question, tool, names = draw.random.choice(OTHER_USES)
    value = f"ls {draw.path()}" if tool == "bash" else draw.word()
    arguments = {name: f"Run {value}" if name == "description" else value for name in names}
    result = "\n".join(draw.phrase() for _ in range(draw.random.choice((1, 1, 2))))
    reasoning = f'I use {tool} with "{value}".'
    return [
        Exchange((question.format(value),), (), reasoning, Call(tool, arguments)),
        Exchange((result,), (Span(result, Label.VALUE),), "I say what it gave.", None, True),
    ]
