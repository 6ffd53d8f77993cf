"""What training has of the real client against what the client sends."""

import json
from dataclasses import replace

import pytest

from bench.nano.data import sessions
from bench.nano.data.client import FILE, LINES, QUESTION, Recording, read_client, record_client
from bench.nano.data.format import Call, Dialogue, Exchange, write_prompt
from bench.nano.data.lines import File, Line
from bench.nano.data.package import Package
from bench.nano.data.shapes import add_context, show_file
from bench.nano.pack import probe_renderer
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import parse_vocabulary
from tests.clients.dsh import InstallError

pytestmark = [pytest.mark.full, pytest.mark.clients, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def recording() -> Recording:
    """A run of the client; skips where it cannot be installed."""
    try:
        return record_client()
    except InstallError as error:
        pytest.skip(str(error))


def test_prompts_of_a_session_are_the_clients(package: Package, recording: Recording) -> None:
    """Question, call, result and request for a title have the ids that the client's own bodies render to."""
    vocabulary = parse_vocabulary(package.tokenizer_text)
    note, preamble = probe_renderer(vocabulary)
    client = read_client(recording)
    real = replace(package, effort_note=note, tools_preamble=preamble, client=client)
    shown = show_file(client, File(FILE, tuple(Line("", line) for line in LINES)), recording.folder)
    exchanges = [
        Exchange(add_context(client, (QUESTION,), recording.folder), (), "", Call("read", {"file_path": FILE})),
        Exchange((shown,), (), "", None, True),
    ]
    session = Dialogue(75, (client.system,), client.tools, exchanges)
    title = sessions.ask_title(client, QUESTION, "")
    made = [write_prompt(real, session, 0), write_prompt(real, session, 1), write_prompt(real, title, 0)]
    for body, ids in zip((*recording.turns, recording.title), made, strict=True):
        assert ids.tolist() == count_prompt("messages", json.dumps(body).encode(), vocabulary)
    assert sessions.PROMPT_TOKENS - 100 < len(made[0]) < sessions.PROMPT_TOKENS + 100
