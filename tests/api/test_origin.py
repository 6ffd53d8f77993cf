"""Pages of other sites: what they may do where the settings name them, and that nothing is said to others."""

import pytest

from dsuf.recipe.vocabulary import Vocabulary
from tests.api.rig import Rig, chat_body, serve

PAGE = "https://page.example"
PREFLIGHT = {
    "Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-new",
}  # fmt: skip


@pytest.mark.parametrize("origins", [(PAGE,), ("https://other.example", PAGE), ("*",)])
async def test_a_page_that_is_let_in(vocabulary: Vocabulary, origins: tuple[str, ...]) -> None:
    """Its browser asks without a key; then the answer can be read, a refusal and a stream like all others."""
    async with serve(vocabulary, cors_origins=origins, keys=("sk-one",)) as rig:
        for path in ("/v1/chat/completions", "/v1/models", "/nowhere"):
            asked = await rig.client.options(rig.url + path, headers=PREFLIGHT)
            assert asked.status == 204 and asked.headers["access-control-allow-origin"] == PAGE
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert asked.headers["access-control-allow-headers"] == "authorization, x-new"
        for key, status, stream in (("", 401, False), ("sk-one", 200, False), ("sk-one", 200, True)):
            response = await rig.post("/v1/chat/completions", chat_body(stream=stream), x_api_key=key, origin=PAGE)
            assert response.status == status and response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in response.headers
        plain = await rig.client.options(rig.url + "/v1/models", headers={"x-api-key": "sk-one"})
        assert plain.status == 405, "no browser asks"


async def test_other_pages_and_other_clients_are_told_nothing(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, cors_origins=(PAGE,)) as rig:
        for origin in ("https://page.example.evil", "http://page.example", "null", PAGE + "/", None):
            headers = PREFLIGHT | {"Origin": origin} if origin else {}
            for method in ("OPTIONS", "GET"):
                response = await rig.client.request(method, rig.url + "/v1/models", headers=headers)
                assert "access-control-allow-origin" not in response.headers
                assert response.headers["vary"] == "Origin", "caches must not mix them up"


async def test_off_by_default(rig: Rig) -> None:
    response = await rig.client.options(rig.url + "/v1/models", headers=PREFLIGHT)
    assert response.status == 405
    response = await rig.client.get(rig.url + "/v1/models", headers={"Origin": PAGE})
    assert response.status == 200 and "vary" not in response.headers
    assert not any(name.lower().startswith("access-control") for name in response.headers)
