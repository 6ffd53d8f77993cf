"""A turn through a whole node, as its trace and its log line tell it."""

import json
import logging
from pathlib import Path

import pytest

from tests.node.rig import Client, running, write_script
from tests.observe.collector import collecting, read_attributes

SECRET = "the-secret-word"
REPLY = {"reply": f"one two {SECRET}", "step_s": 0.02}
FAILING = {"match": "fail", "reply": "one two", "fail_at_step": 2}
PARTS = ["read", "render", "queued", "attach", "prefill", "decode", "write"]


TURNS = [  # path, text, whether as a stream, what the reply ends with
    ("/v1/chat/completions", SECRET, True, b"[DONE]"),
    ("/v1/messages", SECRET, True, b'"message_stop"'),
    ("/v1/messages", SECRET, False, b"stop_reason"),
    ("/v1/chat/completions", "fail", True, b"error"),
]


async def test_every_part_of_a_turn_is_there(model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Part follows part without a gap, and neither trace nor log holds what was asked or said."""
    caplog.set_level(logging.INFO, "dsuf")
    session = {"dsh_session_log": [SECRET], "dsh_plugin_packages": SECRET}
    script = write_script(tmp_path, [FAILING, REPLY])
    with collecting() as collector:
        async with running(model_dir, script, otlp_endpoint=collector.url) as node:
            for path, text, stream, end in TURNS:
                client = await Client.connect(node)
                await client.ask(text, path=path, stream=stream, **session)
                await client.read_until(end)
                client.close()
    wholes = {span.span_id: span for span in collector.spans if not span.parent_span_id}
    assert len(wholes) == 4
    for whole in wholes.values():
        parts = [span for span in collector.spans if span.parent_span_id == whole.span_id]
        assert [part.name for part in parts] == PARTS
        ends = [whole.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
        starts = [*(part.start_time_unix_nano for part in parts), whole.end_time_unix_nano]
        assert max(abs(end - start) for end, start in zip(ends, starts, strict=True)) < 2000  # ns: rounding
        said = read_attributes(whole)
        assert said["http.response.status_code"] == 200 and said["gen_ai.request.model"] == "deepseek-flash"
        assert said.get("error.type") == whole.status.message or "error.type" not in said
    assert (
        sorted(span.name for span in wholes.values()) == ["POST /v1/chat/completions"] * 2 + ["POST /v1/messages"] * 2
    )
    assert sum(span.status.message == "EngineFailed" for span in wholes.values()) == 1
    assert SECRET not in "".join(map(str, collector.spans))
    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert len(lines) == 4 and all(line["queue_s"] >= 0 and line["turn"] for line in lines)
    assert SECRET not in json.dumps([vars(record) for record in caplog.records], default=str)
    turns = [record for record in caplog.records if getattr(record, "fields", {}).get("turn")]
    assert len([record for record in turns if record.levelno == logging.INFO]) == 4, "one line a turn"
