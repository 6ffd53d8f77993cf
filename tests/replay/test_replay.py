"""Turns of a server that wrote records, computed again from these alone."""

import asyncio
import json
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dsuf.__main__ import main
from dsuf.replay.command import read_records, replay
from dsuf.types import TurnRecord
from tests.node.process import serving
from tests.node.test_sessions import QUESTION, ask, wait_idle

SCHEMA = {"type": "object", "properties": {"river": {"type": "string", "maxLength": 9}}, "required": ["river"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "rivers", "schema": SCHEMA}}
OPTIONS = {
    "exact": ("--prefill", "exact", "--prefill-chunk-tokens", "64"),
    "replay": ("--prefill-chunk-tokens", "64"),
    "plain": ("--prefill", "exact", "--drafts", "0"),
}


def converse(folder: Path, mode: str) -> list[TurnRecord]:
    """Serve two conversations side by side and a prompt that shares their beginning; the records of that."""
    with serving("--record-dir", str(folder), "--audit-share", "0", *OPTIONS[mode]) as server:

        def talk(place: str, **fields: object) -> None:
            messages = [{"role": "user", "content": f"{QUESTION} In {place}."}]
            for question in ("And which is the longest?", "Bye."):
                answer, _, _ = ask(server, messages, **fields)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]

        sampled = {"thinking": {"type": "enabled"}, "seed": 5, "max_tokens": 40}
        other = threading.Thread(target=talk, args=("Peru",), kwargs=sampled)
        other.start()
        talk("Asia")
        other.join()
        wait_idle(server)
        ask(server, [{"role": "user", "content": QUESTION + " In Asia. And else?"}], response_format=FORMAT)
        wait_idle(server)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    return read_records(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of a server with the default settings, but for shorter chunks."""
    folder = tmp_path_factory.mktemp("replay") / "records"
    converse(folder, "replay")
    return folder


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All turns come out the same; some of them began in caches of others."""
    (file,) = folder.iterdir()
    records = read_records(file)
    assert len(records) == 5 and sum(record.start > 0 for record in records) >= 2
    assert [record.grammar is not None for record in records] == [False] * 4 + [True] * (len(records) - 4)
    assert not {*QUESTION.split(), "river"} & set(re.findall("[A-Za-z]{4,}", file.read_text())), "no text"
    assert main(["replay", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count(": same, ") == 5 and said.endswith("5 of 5 turns came out the same\n")


def test_every_turn_comes_out_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(folder, capsys)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["exact", "plain"])
def test_so_it_does_with_other_settings(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    converse(tmp_path / "records", mode)
    check(tmp_path / "records", capsys)


@pytest.mark.full
def test_a_turn_that_went_on_from_one_that_ended_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its record comes first in the file."""
    text, thinking = 3 * QUESTION, {"type": "enabled"}
    with serving("--record-dir", str(tmp_path), "--audit-share", "0", *OPTIONS["replay"]) as server:
        with server.stream(f"{text} In Peru.", thinking=thinking, seed=3, max_tokens=400) as stream:
            stream.readline()
            ends_s = time.monotonic() + 60.0
            while not server.get("/server_info")["node"]["session_cache"]["entries"]:
                assert time.monotonic() < ends_s
            ask(server, [{"role": "user", "content": f"{text} In Asia."}], thinking=thinking, max_tokens=3)
            stream.read()
        wait_idle(server)
    (file,) = tmp_path.iterdir()
    short, long = read_records(file)
    assert long.begun_s < short.begun_s and short.start > 0 and not long.start, "the test itself"
    assert main(["replay", str(file)]) == 0
    assert "2 of 2 turns came out the same" in capsys.readouterr().out


def test_a_token_that_was_another_one_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record that was changed is not the same; one whose beginning nobody left cannot be computed."""
    (recorded,) = folder.iterdir()
    records, file = read_records(recorded), tmp_path / "changed.jsonl"

    def write(*lines: TurnRecord) -> None:
        file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    cold, last = records[0], next(record for record in records if record.start)
    write(msgspec.structs.replace(cold, ids=(*cold.ids[:5], cold.ids[5] ^ 1, *cold.ids[6:])))
    assert main(["replay", str(file)]) == 1
    assert f"DIFFERENT from token 5 of {len(cold.ids)} on" in capsys.readouterr().out
    write(last)
    assert main(["replay", str(file), "--turn", last.turn]) == 1
    assert "cannot be computed again: no record of a turn" in capsys.readouterr().out
    write(msgspec.structs.replace(last, origin=msgspec.structs.replace(last.origin, fingerprint="other")))
    assert main(["replay", str(file)]) == 2
    assert "recorded with other" in capsys.readouterr().err


async def test_what_is_cut_off_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    """As by Ctrl-C, which cancels."""

    async def play(record: Any) -> Sequence[int]:
        if record.turn == "c":
            raise asyncio.CancelledError
        return [*record.ids[:-1], 0]

    async def close() -> None:
        pass

    records: Any = [SimpleNamespace(turn=turn, ids=(1, last), start=0) for turn, last in (("a", 0), ("b", 1), ("c", 0))]
    player: Any = SimpleNamespace(play=play)
    engine: Any = SimpleNamespace(close=close)
    with pytest.raises(asyncio.CancelledError):
        await replay(engine, player, records)
    assert capsys.readouterr().out.splitlines() == [
        "1/3 a: same, 2 tokens",
        "2/3 b: DIFFERENT from token 1 of 2 on",
        "1 of 2 turns came out the same; 1 were not computed",
    ]


@pytest.mark.parametrize("text", ["{}\n", "nonsense\n", json.dumps({"version": 1}) + "\n", ""])
def test_what_is_no_record(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    assert main(["replay", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
