"""Raw completions: what the prompt becomes, what comes out, what is refused."""

import json
from typing import Any

import openai
import pytest

from dsuf.errors import EngineFailed
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import StepResult, Turn
from tests.api.rig import MODEL, Rig, Step, read_objects, serve

PATHS = ["/v1/completions", "/completions", "/beta/completions", "/beta/v1/completions"]
BEGIN = "<｜begin▁of▁sentence｜>"


async def complete(rig: Rig, **fields: Any) -> Any:
    """A request with `fields` over a small default body; `...` leaves a field out."""
    body = {"model": MODEL, "prompt": "Once upon"} | fields
    return await rig.post("/v1/completions", {name: value for name, value in body.items() if value is not ...})


@pytest.mark.parametrize("path", PATHS)
async def test_whole(rig: Rig, path: str) -> None:
    rig.play("\n a time", ", a king.")
    response = await rig.post(path, {"model": MODEL, "prompt": "Once upon", "max_tokens": 7}, x_request_id="abc-4")
    reply = await response.json()
    assert response.status == 200 and (reply["id"], reply["object"]) == ("cmpl-abc-4", "text_completion")
    assert reply["choices"] == [{"text": "\n a time, a king.", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    turn = rig.submit.last.turn
    assert rig.vocabulary.decode(turn.prompt.ids) == BEGIN + "Once upon"
    assert turn.prompt.opens_in == "content" and turn.sampling.max_tokens == 7
    assert reply["usage"]["prompt_tokens"] == len(turn.prompt.ids)
    assert reply["usage"]["completion_tokens"] == len(
        rig.vocabulary.encode("\n a time") + rig.vocabulary.encode(", a king.")
    )
    assert "reasoning_tokens" not in reply["usage"]["completion_tokens_details"]


async def test_stream(rig: Rig) -> None:
    rig.play("a", " time", prefilled=True, finish="length")
    text = await (await complete(rig, stream=True, stream_options={"include_usage": True})).text()
    chunks = read_objects(text)
    assert text.endswith("data: [DONE]\n\n") and {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", " time", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None]
    assert chunks[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "reply",
    ["Hm.</think>Hi <think>", "<｜DSML｜ calls>\n", "世界 👋🏽 <", "<｜User｜>x<｜Assistant｜></think>", " ", "\n\n"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_all_of_a_reply_is_text(rig: Rig, reply: str, stream: bool) -> None:
    rig.play(*[[token] for token in rig.vocabulary.encode(reply)])
    response = await complete(rig, stream=stream)
    chunks = read_objects(await response.text()) if stream else [await response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reply


async def test_sampling_is_what_was_sent(rig: Rig) -> None:
    assert (await complete(rig, temperature=0.25, top_p=0.5, seed=7)).status == 200
    sampling = rig.submit.last.turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.25, 0.5, 7, 8192)
    await complete(rig, top_p=None, temperature=None, max_tokens=None, stop=None, suffix=None, echo=None)
    sampling = rig.submit.last.turn.sampling
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


async def test_a_stop_string(rig: Rig) -> None:
    ids = rig.vocabulary.encode("one two STOP three")
    rig.play(ids, " never read")
    reply = await (await complete(rig, stop="STOP")).json()
    assert reply["choices"][0]["text"] == "one two " and reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == rig.submit.last.used_tokens < len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(rig: Rig, stream: bool) -> None:
    rig.play(" a time")
    for prompt in ("Once upon", rig.vocabulary.encode("Once upon")):
        response = await complete(rig, echo=True, stream=stream, prompt=prompt)
        chunks = read_objects(await response.text()) if stream else [await response.json()]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Once upon a time"


async def test_prompts_in_all_forms(rig: Rig) -> None:
    ids = rig.vocabulary.encode("Once upon")
    for prompt in ("Once upon", ["Once upon"], ids, [ids], BEGIN + "Once upon", rig.vocabulary.encode(BEGIN) + ids):
        assert (await complete(rig, prompt=prompt)).status == 200
    prompts = {ticket.turn.prompt.ids for ticket in rig.submit.tickets}
    assert prompts == {(*rig.vocabulary.encode(BEGIN), *ids)}


async def test_a_raw_prompt_may_hold_special_tokens(rig: Rig) -> None:
    """So a template can be written by hand: the chat's own prompt, sent as text, is the same prompt."""
    await rig.chat(thinking={"type": "disabled"})
    chat = rig.submit.last.turn.prompt.ids
    await complete(rig, prompt=rig.vocabulary.decode(chat))
    assert rig.submit.last.turn.prompt.ids == chat


async def test_the_middle_of_a_text(rig: Rig) -> None:
    rig.play("a + b")
    body = {"prompt": "def add(a, b):\n    return ", "suffix": "\n\nprint(add(1, 2))  # <｜User｜><think>"}
    reply = await (await complete(rig, **body)).json()
    assert reply["choices"][0]["text"] == "a + b"
    ids, specials = rig.submit.last.turn.prompt.ids, rig.vocabulary.specials
    begin, hole, end = (ids.index(specials[f"<｜fim▁{mark}｜>"]) for mark in ("begin", "hole", "end"))
    assert (begin, end) == (1, len(ids) - 1)
    assert rig.vocabulary.decode(ids[begin + 1 : hole]) == body["prompt"]
    assert rig.vocabulary.decode(ids[hole + 1 : end]) == body["suffix"]
    assert [token for token in ids if token in specials.values()] == [ids[0], ids[1], ids[hole], ids[end]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ...}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": []}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"), ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [5], "suffix": "x"}, "prompt"),
        ({"echo": True, "suffix": "x"}, "echo"), ({"best_of": 2}, "best_of"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"model": ...}, None), ({"model": "gpt-9"}, None), ({"n": 2}, None), ({"max_tokens": 0}, None),
        ({"stop": [""]}, None), ({"stop": ["x"] * 17}, None), ({"temperature": 3}, None), ({"logprobs": 21}, None),
        ({"logprobs": "x"}, None), ({"suffix": 5}, None), ({"stream_options": {}}, None), ({"echo": "x"}, None),
        ({"seed": -1}, None),
    ],
)  # fmt: skip
async def test_refusals(rig: Rig, fields: dict[str, Any], param: str | None) -> None:
    response = await complete(rig, **fields)
    error = (await response.json())["error"]
    assert response.status == 400 and error["type"] == "invalid_request_error" and error["param"] == param
    assert rig.submit.tickets == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b"[" * 5000])
async def test_bodies_that_are_none(rig: Rig, body: bytes) -> None:
    response = await rig.post("/v1/completions", body)
    assert response.status == 400 and (await response.json())["error"]["type"] == "invalid_request_error"


async def test_too_long(rig: Rig) -> None:
    response = await complete(rig, prompt=[5] * 1_048_577)
    assert response.status == 400
    assert "maximum context length is 1048576 tokens" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(vocabulary: Vocabulary, stream: bool) -> None:
    """In parallel lists, with the places of the tokens in the text; the token itself is among its alternatives."""
    async with serve(vocabulary, logprobs=True) as rig:
        await check_log_probabilities(rig, stream)


async def check_log_probabilities(rig: Rig, stream: bool) -> None:
    ids = rig.vocabulary.encode("a time, a king")
    other = rig.vocabulary.encode("x")[0]

    def script(turn: Turn) -> list[Step]:
        steps: list[Step] = [
            StepResult(turn=turn.id, ids=(token,), logprobs=((-0.5 - i, ((other, -0.25),)),))
            for i, token in enumerate(ids)
        ]
        return [*steps, StepResult(turn=turn.id, finish="stop")]

    rig.submit.script = script
    response = await complete(rig, logprobs=1, stream=stream)
    chunks = read_objects(await response.text()) if stream else [await response.json()]
    assert rig.submit.last.turn.sampling.logprobs == 1
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    tokens, values, top, offsets = (
        [entry for one in told for entry in one[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert tokens == [rig.vocabulary.decode([token]) for token in ids] and "".join(tokens) == text
    assert values == [-0.5 - i for i in range(len(ids))]
    assert top == [{"x": -0.25, token: value} for token, value in zip(tokens, values, strict=True)]
    assert [text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)] == [True] * len(ids)
    assert offsets == sorted(set(offsets))


async def test_a_failure_breaks_the_connection(rig: Rig) -> None:
    rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=(5,)), EngineFailed("the engine failed")]
    async with openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="sk-local", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="the engine failed"):
            async for _ in await client.completions.create(model=MODEL, prompt="x", stream=True):
                pass


async def test_sdk(rig: Rig) -> None:
    rig.play("a", " time")
    async with openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="sk-local", max_retries=0) as client:
        whole = await client.completions.create(model=MODEL, prompt="Once upon", max_tokens=9)
        stream = await client.completions.create(model=MODEL, prompt="Once upon", max_tokens=9, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == "a time"
    assert json.loads(whole.model_dump_json())["usage"]["completion_tokens"] == 2
