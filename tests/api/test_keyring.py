"""Keys: files of them, tenants, what a key may have under way and begin, and changes while the server runs."""

import asyncio
from pathlib import Path

import pytest

from dsuf.api.keyring import Key, gather_keys
from dsuf.api.quota import Quotas, refill
from dsuf.api.server import ROUTES
from dsuf.errors import CommandError, RateLimited
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import StepResult
from tests.api.rig import chat_body, connect, leave, serve, until

BOUNDS = Key(text="", concurrent=3)
CHAT = "/v1/chat/completions"


def test_a_file_says_tenants_and_bounds(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  sk-a#b tenant=team-a per_minute=60 # the bot\nsk-two concurrent=0\nsk-three\n")
    keys = gather_keys(("sk-one", "sk-two"), file, BOUNDS)
    assert keys == [
        Key(text="sk-one", concurrent=3), Key(text="sk-two", concurrent=0),
        Key(text="sk-a#b", tenant="team-a", concurrent=3, per_minute=60), Key(text="sk-three", concurrent=3),
    ]  # fmt: skip
    assert keys[2].name == "team-a" and keys[0].name not in ("", "sk-one")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"), ("\n# sk-one\n", "holds no key"), ("a\nsk-secret tenants=x", "line 2: 'tenants'"),
        ("sk-secret concurrent=-1", "line 1: concurrent"), ("sk-secret per_minute=x", "line 1: concurrent"),
        ("sk-secret tenant=a/b", "tenant='a/b'"), ("sk-secret tenant=", "tenant=''"), (b"\xff\xfe", "cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_and_no_key_of_it(tmp_path: Path, text: str | bytes, words: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CommandError) as refused:
        gather_keys((), file, BOUNDS)
    assert words in str(refused.value) and "sk-secret" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no-such.*cannot be read"):
        gather_keys((), tmp_path / "no-such", BOUNDS)


async def test_every_route_but_the_open_ones_asks_for_a_key(vocabulary: Vocabulary) -> None:
    """The list of open routes stands here again: one more of them must be meant."""
    async with serve(vocabulary, keys=("sk-one",), admin_keys=("sk-root",)) as rig:
        refused = await rig.client.get(rig.url + "/v1/models", headers={"x-api-key": "sk-root"})
        assert refused.status == 403 and "an admin key is for" in (await refused.json())["error"]["message"]
        opened = set()
        for route in ROUTES:
            for path in (route.path, *route.aliases):
                response = await rig.client.request(route.method, rig.url + path)
                assert response.status in (200, 401), path
                opened |= {path} if response.status == 200 else set()
        for path in ("/v1/models/deepseek-flash", "/no/such/path", "/v1/files"):
            assert (await rig.client.get(rig.url + path)).status == 401
        assert opened == {"/", "/frame", "/health", "/healthz", "/livez", "/readyz", "/ready", "/metrics"}


async def test_keys_of_a_tenant_share_its_prefixes_and_its_users_do_not(vocabulary: Vocabulary) -> None:
    keys = [Key(text="sk-a1", tenant="a"), Key(text="sk-a2", tenant="a"), Key(text="sk-b", tenant="b")]
    async with serve(vocabulary, keys=keys) as rig:
        salts, tenants = {}, {}
        for key, user in (("sk-a1", None), ("sk-a2", None), ("sk-b", None), ("sk-a1", "u"), ("sk-b", "u")):
            await rig.post("/v1/messages", chat_body(max_tokens=5, metadata={"user_id": user}), x_api_key=key)
            salts[key, user], tenants[key] = rig.submit.last.turn.prompt.salt, rig.submit.last.turn.tenant
        assert salts["sk-a1", None] == salts["sk-a2", None]
        assert len(set(salts.values())) == 4 and "" not in salts.values()
        assert tenants == {"sk-a1": "a", "sk-a2": "a", "sk-b": "b"}


async def test_keys_change_while_the_server_runs(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, keys=("sk-old",)) as rig:
        rig.submit.script = lambda turn: [
            StepResult(turn=turn.id, ids=(5,)),
            0.3,
            StepResult(turn=turn.id, finish="stop"),
        ]
        running = asyncio.ensure_future(rig.post(CHAT, chat_body(), x_api_key="sk-old"))
        await until(lambda: len(rig.submit.tickets) == 1)
        rig.keys.replace([Key(text="sk-new")])
        for key, status in (("sk-old", 401), ("sk-new", 200)):
            response = await rig.client.get(rig.url + "/v1/models", headers={"x-api-key": key})
            assert response.status == status
        assert (await running).status == 200, "what runs goes on"


async def test_requests_under_way_are_bounded(vocabulary: Vocabulary) -> None:
    """Whole and streamed ones count, until their last byte; one whose client has left does not."""
    async with serve(vocabulary, keys=[Key(text="sk-one", concurrent=2), Key(text="sk-two", concurrent=1)]) as rig:
        rig.submit.script = lambda turn: [StepResult(turn=turn.id, ids=(5,)), float("inf")]
        body = chat_body(stream=True)
        headers = {"x-api-key": "sk-one"}
        running = [await rig.client.post(rig.url + CHAT, json=body, headers=headers) for _ in range(2)]
        refused = await rig.post(CHAT, body, x_api_key="sk-one")
        error = (await refused.json())["error"]
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert error["type"] == "rate_limit_error" and "2 requests under way" in error["message"]
        assert (await rig.client.get(rig.url + "/v1/models", headers=headers)).status == 200, "asking costs nothing"
        other = await rig.client.post(rig.url + CHAT, json=body, headers={"x-api-key": "sk-two"})
        assert other.status == 200, "another key has bounds of its own"
        running[0].close()
        await until(lambda: rig.submit.tickets[0].cancelled.is_set())
        await until(lambda: len(rig.metrics.disconnects) == 1)
        again = await rig.client.post(rig.url + CHAT, json=body, headers=headers)
        assert again.status == 200
        for response in (running[1], other, again):
            response.close()


async def test_a_request_that_fails_is_under_way_no_longer(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, keys=[Key(text="sk-one", concurrent=1)]) as rig:
        for body in (b"{", chat_body(model="none"), chat_body()):
            assert (await rig.post(CHAT, body, x_api_key="sk-one")).status in (200, 400)
        raw = await connect(rig.port, CHAT, b"")
        leave(raw, "reset")
        assert (await rig.post(CHAT, chat_body(), x_api_key="sk-one")).status == 200


async def test_requests_a_minute_are_bounded(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, keys=[Key(text="sk-one", per_minute=3)]) as rig:
        statuses = [(await rig.post(CHAT, chat_body(), x_api_key="sk-one")).status for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        refused = await rig.post("/v1/messages", chat_body(max_tokens=5), x_api_key="sk-one")
        assert refused.status == 429 and refused.headers["retry-after"] == "10", "clients take more as final"
        assert (await refused.json())["error"]["type"] == "rate_limit_error"


def test_what_may_begin_comes_back_with_time() -> None:
    now_s = 100.0
    quotas, key = Quotas(lambda: now_s), Key(text="k", per_minute=6)

    def begin(times: int) -> int:
        begun = 0
        for _ in range(times):
            try:
                with quotas.hold(key):
                    begun += 1
            except RateLimited as error:
                assert 1 <= (error.retry_after_s or 0) <= 10
        return begun

    assert begin(9) == 6
    for passed_s, expected in ((9.9, 0), (0.2, 1), (25.0, 2), (3600.0, 6)):
        now_s += passed_s
        assert begin(9) == expected
    assert begin(1) == 0
    key = Key(text="k", per_minute=60)  # read again with another bound: nobody gets more at once
    assert begin(9) == 0
    assert refill(0.5, 1.0, 60) == 1.5 and refill(59.5, 10.0, 60) == 60


def test_meters_of_keys_that_were_not_seen_for_long_are_dropped() -> None:
    now_s = 0.0
    quotas = Quotas(lambda: now_s)
    with quotas.hold(Key(text="runs", concurrent=1)):
        for number in range(5000):
            now_s += 1.0
            with quotas.hold(Key(text=f"k{number}", concurrent=1)):
                pass
        assert len(quotas._meters) <= 1024
        with pytest.raises(RateLimited), quotas.hold(Key(text="runs", concurrent=1)):
            pass
