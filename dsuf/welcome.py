"""What a server says once it is ready: how to send it a first request."""

from dsuf.config import Settings


def describe_use(url: str, settings: Settings) -> str:
    """How to send a first request, with curl, the SDKs and dsh."""
    asked = settings.api_keys or settings.api_key_file is not None
    key = "YOUR_KEY" if asked else "any"
    header = f" -H 'authorization: Bearer {key}'" if asked else ""
    body = (
        '{"model": "deepseek-flash", "stream": true, "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "Hello"}]}'
    )
    return "\n".join(
        (
            f"curl -N {url}/v1/chat/completions{header} -H 'content-type: application/json' -d '{body}'",
            f'OpenAI SDK: OpenAI(base_url="{url}/v1", api_key="{key}"), model "deepseek-flash"',
            f'Anthropic SDK: Anthropic(base_url="{url}", api_key="{key}"), model "deepseek-flash"',
            f"dsh: DEEPSEEK_BASE_URL={url} DEEPSEEK_API_KEY={key} DSH_HOME=$HOME/.dsh dsh --profile headless 'Hello'",
        )
    )
