"""What is done to a body before the library reads it."""

import json
from typing import Any

import pytest

from dsuf.api.exchange import choose_request_id
from dsuf.api.keyring import Key, Keyring, make_salt
from dsuf.api.wire import read_chat, read_messages
from dsuf.errors import AuthenticationFailed

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> Any:
    """The body as it goes on."""
    return json.loads(read_chat(json.dumps({"messages": [USER]} | fields).encode()).body)


def test_a_body_without_oddities_stays_byte_for_byte() -> None:
    body = b'{ "messages":[{"role":"user","content":"the \\"developer\\" role"}], "n":1e2, "n":1 }'
    assert read_chat(body).body is body and read_messages(body).body is body
    body = (
        b'{ "tools":[{"name":"custom"}], "messages":[{"role":"user","content":[{"type":"text","text":"document"}]}] }'
    )
    assert read_messages(body).body is body


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b"\xff", b'{"max_completion_tokens": 5, "n": NaN}',
                                  b'{"dsh_session_log": [}', b"[" * 9_999])  # fmt: skip
def test_what_is_no_object_goes_on_as_it_is(body: bytes) -> None:
    assert read_chat(body).body is body and read_messages(body).body is body


def test_developer_becomes_system_in_the_role_only() -> None:
    said = {"role": "user", "content": "developer", "name": "developer"}
    sent = [{"role": "developer", "content": "a"}, said, 5, {"role": "developer", "content": "b"}]
    assert chat(messages=sent)["messages"] == [
        {"role": "system", "content": "a"}, said, 5, {"role": "system", "content": "b"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, 5), ({"max_completion_tokens": 5, "max_tokens": 7}, 7),
        ({"max_completion_tokens": 5, "max_tokens": None}, 5), ({"max_completion_tokens": "x"}, "x"),
        ({"max_completion_tokens": None}, None), ({}, None),
    ],
)  # fmt: skip
def test_max_completion_tokens(fields: dict[str, Any], expected: Any) -> None:
    assert chat(**fields).get("max_tokens") == expected


def test_private_data_is_left_out() -> None:
    private = {"dsh_session_log": [{"a": 1}], "dsh_plugin_packages": {"b": "c"}}
    kept = {"messages": [{"role": "user", "content": 'about "dsh_session_log"'}], "tools": [{"dsh_session_log": 1}]}
    for read in (read_chat, read_messages):
        assert json.loads(read(json.dumps(kept | private).encode()).body) == kept


@pytest.mark.parametrize(("sent", "user"), [("me", "me"), (5, ""), (None, ""), ("", "")])
def test_user(sent: Any, user: str) -> None:
    body = json.dumps({"user_id": sent}).encode()
    assert read_chat(body).user == read_messages(body).user == user


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"1": 2}}, "logit_bias"), ({"logit_bias": {}}, None), ({"modalities": ["text"]}, None),
        ({"modalities": ["text", "audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "modalities"),
        ({"modalities": "audio"}, "modalities"), ({"modalities": [[]]}, "modalities"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], param: str | None) -> None:
    refusal = read_chat(json.dumps({"messages": [USER]} | fields).encode()).refusal
    assert (refusal and refusal.param) == param


@pytest.mark.parametrize("sent", ["abc", "~!x", "x" * 128])
def test_request_ids_that_are_kept(sent: str) -> None:
    assert choose_request_id(sent) == sent


@pytest.mark.parametrize("sent", [None, "", "a b", "é", "x" * 129, "a\x7f", "a\n"])
def test_request_ids_that_are_replaced(sent: str | None) -> None:
    chosen = choose_request_id(sent)
    assert chosen != sent and len(chosen) == 32 and choose_request_id(sent) != chosen


def test_keys() -> None:
    ring = Keyring([Key(text="j"), Key(text="k")])
    assert Keyring().authenticate({"x-api-key": "anything"}) is None and not Keyring().asked
    for headers in (
        {"x-api-key": "k"},
        {"Authorization": "bearer  k"},
        {"Authorization": "Bearer k", "x-api-key": "x"},
    ):
        assert ring.authenticate(headers) == Key(text="k")
    for headers in ({}, {"x-api-key": "K"}, {"Authorization": "k"}, {"Authorization": "Bearer x", "x-api-key": "k"}):
        with pytest.raises(AuthenticationFailed):
            ring.authenticate(headers)


def test_salts() -> None:
    assert make_salt("", "") == ""
    assert len({make_salt("a", "b"), make_salt("ab", ""), make_salt("", "ab"), make_salt("a", "")}) == 4


def test_a_role_spelt_with_escapes_is_known() -> None:
    body = b'{"messages":[{"role":"\\u0064eveloper","content":"Hi"}]}'
    assert json.loads(read_chat(body).body)["messages"] == [{"role": "system", "content": "Hi"}]


@pytest.mark.parametrize("modalities", ["audio", ["text", "audio"]])
def test_output_other_than_text_is_refused(modalities: object) -> None:
    refusal = read_chat(json.dumps({"messages": [USER], "modalities": modalities}).encode()).refusal
    assert refusal is not None and refusal.param == "modalities"
    assert read_chat(json.dumps({"messages": [USER], "modalities": "text"}).encode()).refusal is None


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({"user_id": "a"}, "a"),
        ({"metadata": {"user_id": "b"}}, "b"),
        ({"user_id": "a", "metadata": {"user_id": "b"}}, "a"),
        ({"metadata": {"user_id": 5}}, ""),
        ({"metadata": "b"}, ""),
        ({"metadata": None, "user_id": None}, ""),
    ],
)
def test_whose_prefixes_they_are(fields: dict[str, Any], user: str) -> None:
    body = json.dumps({"messages": [USER], **fields}).encode()
    assert read_chat(body).user == read_messages(body).user == user
