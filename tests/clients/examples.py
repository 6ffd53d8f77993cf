"""What the scripted engine answers to the examples in `docs/`."""

from typing import Any

from tests.clients import replies

RULES: list[dict[str, Any]] = [
    {"match": "<tool_result>", "reasoning": "Four degrees and rain.", "reply": "Four degrees, and it rains."},
    {"match": "weather in Oslo", "reasoning": "I look it up.", "reply": replies.call("weather", {"city": "Oslo"})},
    {"match": "Oslo and its size", "reasoning": "About 700,000.", "reply": '{"name": "Oslo", "inhabitants": 717710}'},
    {"match": "capital of Norway", "reasoning": "An easy one.", "reply": "Oslo."},
    {"match": "Count to ten", "reply": "one, two, three, four, five, six, seven, eight, nine, ten"},
    {"match": "My favourite", "reply": " is blue."},
    {"match": "Once upon", "reply": " a time there was a king.\nHe had a crown."},
    {"match": "def add", "reply": "a + b"},
]
