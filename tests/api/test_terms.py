"""Priority, timeout and tenant of a request, and who may drop the prefix cache."""

import json
from typing import Any

import pytest

from dsuf.errors import DeadlineExceeded
from dsuf.recipe.vocabulary import Vocabulary
from tests.api.rig import Rig, chat_body, serve

PATHS = ["/v1/chat/completions", "/v1/messages"]


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_asked_for_is_the_middle_and_for_ever(rig: Rig, path: str) -> None:
    assert (await rig.post(path, chat_body(max_tokens=9))).status == 200
    turn = rig.submit.last.turn
    assert (turn.priority, turn.timeout_s, turn.tenant) == (0, None, "")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("priority", [-100, -3, 0, 7, 100])
async def test_priority_in_body_or_header_and_timeout(rig: Rig, path: str, priority: int) -> None:
    assert (await rig.post(path, chat_body(max_tokens=9, priority=priority))).status == 200
    assert rig.submit.last.turn.priority == priority
    headers = {"x-dsuf-priority": str(priority), "x-dsuf-timeout-s": "2.5"}
    assert (await rig.post(path, chat_body(max_tokens=9, priority=1), **headers)).status == 200
    assert (rig.submit.last.turn.priority, rig.submit.last.turn.timeout_s) == (priority, 2.5)


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        ({"priority": 101}, {}, "whole number from -100 to 100"),
        ({"priority": "soon"}, {}, "whole number"),
        ({"priority": 1.5}, {}, "whole number"),
        ({"priority": True}, {}, "whole number"),
        ({"priority": [1]}, {}, "whole number"),
        ({}, {"x-dsuf-priority": ""}, "whole number"),
        ({}, {"x-dsuf-priority": "500"}, "`x-dsuf-priority` must be a whole number"),
        ({}, {"x-dsuf-priority": "1e2"}, "whole number"),
        ({}, {"x-dsuf-priority": "1_0"}, "whole number"),
        ({"priority": "1_0"}, {}, "whole number"),
        ({}, {"x-dsuf-timeout-s": "0"}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "nan"}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "inf"}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "soon"}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "1_0"}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "-1"}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "."}, "number of seconds"),
        ({}, {"x-dsuf-timeout-s": "1e-9"}, "plain decimals"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    rig: Rig, body: dict[str, Any], headers: dict[str, str], words: str
) -> None:
    for path in PATHS:
        response = await rig.post(path, chat_body(max_tokens=9, **body), **headers)
        assert response.status == 400 and words in (await response.json())["error"]["message"]
    assert rig.submit.tickets == []


async def test_with_keys_nobody_puts_itself_before_the_others(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, keys=("sk-one",)) as rig:
        for priority, status in ((-1, 400), (0, 200), (5, 200)):
            response = await rig.post(
                "/v1/chat/completions", chat_body(priority=priority), authorization="Bearer sk-one"
            )
            assert response.status == status
        assert rig.submit.last.turn.tenant not in ("", "sk-one"), "the key's name, which does not tell the key"


async def test_without_keys_the_user_is_the_tenant(rig: Rig) -> None:
    for user in ("alice", "bob"):
        await rig.chat(user_id=user)
        assert rig.submit.last.turn.tenant == user
    await rig.chat(user_id=17)
    assert rig.submit.last.turn.tenant == ""


async def test_a_turn_over_its_deadline_is_told_as_such(rig: Rig) -> None:
    rig.submit.script = lambda turn: [DeadlineExceeded("no complete answer within 2.5 s (queued)", retry_after_s=3)]
    response = await rig.chat()
    assert (response.status, response.headers["retry-after"]) == (504, "3")
    assert (await response.json())["error"]["type"] == "timeout_error"
    response = await rig.message(max_tokens=9)
    assert (response.status, (await response.json())["error"]["type"]) == (504, "timeout_error")


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, "", 200),
        ({"keys": ("sk-one",)}, "sk-one", 403),
        ({"keys": ("sk-one",)}, "", 401),
        ({"keys": ("sk-one",), "admin_keys": ("sk-root",)}, "sk-one", 403),
        ({"keys": ("sk-one",), "admin_keys": ("sk-root",)}, "sk-two", 401),
        ({"keys": ("sk-one",), "admin_keys": ("sk-root",)}, "", 401),
        ({"keys": ("sk-one",), "admin_keys": ("sk-root",)}, "sk-root", 200),
        ({"admin_keys": ("sk-root",)}, "", 401),
        ({"admin_keys": ("sk-root",)}, "sk-root", 200),
    ],
)
async def test_who_may_drop_the_prefix_cache(
    vocabulary: Vocabulary, path: str, settings: dict[str, Any], key: str, status: int
) -> None:
    async with serve(vocabulary, **settings) as rig:
        response = await rig.post(path, b"", **({"authorization": f"Bearer {key}"} if key else {}))
        assert response.status == status
        assert rig.status.flushed == (status == 200)
        answer = json.loads(await response.read())
        if status == 200:
            assert answer == {"flushed": 7}
        else:
            assert answer["error"]["type"] == {401: "authentication_error", 403: "permission_error"}[status]
