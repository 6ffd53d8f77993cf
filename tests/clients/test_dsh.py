"""Both generations of the released client against a real server process: answers, a tool round trip, a length stop."""

from pathlib import Path

import pytest

from dsuf.checkpoint.forms import NANO
from tests.clients import dsh, process, replies

pytestmark = [pytest.mark.full, pytest.mark.clients, pytest.mark.timeout(600)]

# What the client prints when a server breaks its protocol (0.2.1) or the connection.
PROTOCOL_ERRORS = ("MALFORMED_RESPONSE", "STREAM_CLOSED", "TRANSPORT", "EMPTY_RESPONSE", "MISSING_CREDENTIAL")


class Client:
    """One generation of the client, installed."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.program = dsh.install(version, dsh.find_cache())

    def ask(self, url: str, prompt: str, folder: Path, **options: object) -> dsh.Outcome:
        """Run it once in `folder`."""
        return dsh.run(self.program, self.version, url, prompt, folder=folder, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=list(dsh.DIGESTS))
def client(request: pytest.FixtureRequest) -> Client:
    """Each generation in turn; skips where it cannot be installed."""
    try:
        return Client(request.param)
    except dsh.InstallError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the client works in."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_answer(client: Client, folder: Path, tmp_path: Path) -> None:
    """The scripted text arrives whole, beyond ASCII included."""
    text = "Seven files, \N{SNOWMAN} and 漢字."
    with process.serve_script(tmp_path, [{"reasoning": "I count.", "reply": text}]) as url:
        outcome = client.ask(url, "How many files?", folder)
    assert (outcome.status, outcome.answer) == (0, text), outcome.errors


def test_tool_round_trip(client: Client, folder: Path, tmp_path: Path) -> None:
    """The model calls a tool of the client; the client runs it and sends what it gave; the model answers from that."""
    (folder / "note.txt").write_text("the word is mauve-1742\n")
    rules = [
        {"absent": replies.WITH_TOOLS, "reply": "A title"},
        {"match": ["<tool_result>", "mauve-1742"], "reasoning": "Now I know.", "reply": "The note says mauve-1742."},
        {"absent": "<tool_result>", "reasoning": "I read.", "reply": replies.call("read", {"file_path": "note.txt"})},
    ]
    with process.serve_script(tmp_path, rules) as url:
        outcome = client.ask(url, "What does note.txt say?", folder)
    assert (outcome.status, outcome.answer) == (0, "The note says mauve-1742."), outcome.errors


def test_length_stop_is_the_clients_failure(client: Client, folder: Path, tmp_path: Path) -> None:
    """A reply cut at max_tokens is printed, and the client exits with 1."""
    with process.serve_script(tmp_path, [{"reasoning": "", "reply": "one two three", "finish": "length"}]) as url:
        outcome = client.ask(url, "Count.", folder)
    assert outcome.status == 1
    assert not [word for word in PROTOCOL_ERRORS if word in outcome.errors], outcome.errors


def test_engine_failure_is_retried(client: Client, folder: Path, tmp_path: Path) -> None:
    """A turn that fails in mid-stream ends in a way that the client answers with a second try."""
    # The prompt takes fewer than 30 steps of 256 tokens, so this step decodes and part of the reply is out.
    half = {"reasoning": "I begin.", "reply": "and on " * 100, "fail_at_step": 40}
    rules = [
        {"match": replies.WITH_TOOLS, "times": 1, **half},
        {"reasoning": "Again.", "reply": "The whole answer."},
    ]
    with process.serve_script(tmp_path, rules) as url:
        outcome = client.ask(url, "Say it.", folder)
    assert (outcome.status, outcome.answer) == (0, "The whole answer."), outcome.errors
    lines = (tmp_path / "server.log").read_text().splitlines()
    (failed,) = [line for line in lines if '"failure":"EngineFailed"' in line]
    assert '"completion_tokens":0' not in failed


def test_default_model_keeps_the_protocol(client: Client, folder: Path, tmp_path: Path) -> None:
    """A reply of a few tokens is cut; the client may end with 1 for its length, never for a protocol error."""
    with process.serve(tmp_path / "server.log") as url:
        outcome = client.ask(url, "Hello.", folder, max_tokens=24, title=False, timeout_s=300)
    assert outcome.status in (0, 1), outcome.errors
    assert not [word for word in PROTOCOL_ERRORS if word in outcome.errors], outcome.errors


@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="no shipped model in dsuf/nano")
@pytest.mark.parametrize("client", [dsh.NEWEST], indirect=True)
def test_shipped_model_reads_a_file(client: Client, folder: Path, tmp_path: Path) -> None:
    """Asked for a line, it has the client read the file and answers with that line: for two files of three at least."""
    files = {"notes.txt": "1742 stones", "cellar.txt": "the cheese is old", "ships.txt": "nine boats at noon"}
    right = 0
    with process.serve(tmp_path / "server.log") as url:
        for name, line in files.items():
            (folder / name).write_text(f'"amber": ninety apples\n"mauve": {line}\n"teal": a long way home\n')
            question = f'In the file "{name}", what does the line "mauve" say?'
            outcome = client.ask(url, question, folder, title=False, timeout_s=300)
            right += outcome.status == 0 and line in outcome.answer
    assert right >= 2
