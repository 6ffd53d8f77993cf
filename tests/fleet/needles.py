"""Conversations that ask for what was told in earlier turns, with a fleet behind a balancer, beside a node alone.

Of ten turns the first one shows a text, its own from the first word on (less than a page nobody fetches), four tell a
fact, and five ask for one, in the forms of the shipped model's card.
"""

import asyncio
import random
from collections.abc import Sequence

import aiohttp
import msgspec

from tests.fleet.rig import TOTALS, Chat, add_up

KINDS = ("code", "password", "room number", "serial number", "price")
WORDS = (
    "amber", "falcon", "river", "stone", "window", "paper", "candle", "garden", "silver", "engine", "harbour", "winter",
    "copper", "meadow", "lantern", "orange", "valley", "mirror", "thunder", "basket",
)  # fmt: skip
TOLD, QUESTIONS, TURNS = 4, 5, 10
MOST_TOKENS = 40
AT_ONCE = 6


class Line(msgspec.Struct, frozen=True):
    """What the user says in a turn, and the reply that is right; None where any is."""

    text: str
    right: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of some conversations: right replies of those asked for facts, those that a node alone gives too, later
    turns that reused nothing, later turns' prompt tokens by source, and those computed again though they were kept."""

    sessions: int
    questions: int
    right: int
    equal: int
    without_reuse: int
    tokens: dict[str, int]
    recomputed: int
    wrong: list[tuple[str, str]]

    @property
    def shares(self) -> dict[str, float]:
        """Of later turns' prompt tokens, by source."""
        return {name: round(count / sum(self.tokens.values()), 4) for name, count in self.tokens.items()}


def plan_talk(number: int, texts: Sequence[str]) -> list[Line]:
    """Conversation `number`, which shows one of `texts`."""
    rng = random.Random(number)
    words = rng.sample(WORDS, 2 * TOLD)
    names = [f'"{first} {second}"' for first, second in zip(words[::2], words[1::2], strict=True)]
    facts = [f"The {rng.choice(KINDS)} of {name} is {rng.randrange(10_000, 100_000)}." for name in names]
    lines = [Line(f"Read text {number + 1}.\n\n{texts[number % len(texts)]}\n\nThat is the text.")]
    lines += [Line(f"Remember this. {fact}") for fact in facts]
    asked = [*rng.sample(facts, TOLD), *rng.sample(facts, QUESTIONS - TOLD)]
    return lines + [Line(f"What is {fact[0].lower() + fact[1:].rpartition(' is ')[0]}?", fact) for fact in asked]


async def talk(session: aiohttp.ClientSession, url: str, lines: Sequence[Line], gate: asyncio.Semaphore) -> Chat:
    """Say all `lines`, each as soon as the reply to the one before is there, when little of that is kept yet."""
    chat = Chat(session, lines[0].text)
    for place in range(len(lines)):
        if place:
            chat.say(lines[place].text)
        async with gate:
            await chat.ask(url, max_tokens=MOST_TOKENS)
    return chat


async def compare(fleet: str, alone: str, sessions: int, texts: Sequence[str]) -> Result:
    """`sessions` conversations with the fleet at one URL, and the same with the node at the other."""
    plans, gate = [plan_talk(number, texts) for number in range(sessions)], asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        around, there = [
            await asyncio.gather(*(talk(session, url, lines, gate) for lines in plans)) for url in (fleet, alone)
        ]
    asked = [(line.right, said) for lines, chat in zip(plans, around, strict=True)
             for line, said in zip(lines, chat.replies, strict=True) if line.right is not None]  # fmt: skip
    return Result(
        sessions=sessions, questions=len(asked), right=sum(right == said.strip() for right, said in asked),
        equal=sum(chat.replies == other.replies for chat, other in zip(around, there, strict=True)),
        without_reuse=sum(not details["cached_tokens"] for chat in around for details in chat.details[1:]),
        tokens=add_up(around, first=False), recomputed=sum(chat.recomputed_tokens for chat in around),
        wrong=[(str(right), said) for right, said in asked if right != said.strip()],
    )  # fmt: skip


def tabulate(result: Result, what: str) -> dict[str, object]:
    """A row of figures."""
    shares = {name.removesuffix("_tokens"): result.shares[name] for name in TOTALS}
    return {
        "what": what, "sessions": result.sessions, "turns": TURNS * result.sessions, "questions": result.questions,
        "right": result.right, "sessions_equal": result.equal, "later_turns_without_reuse": result.without_reuse,
        **shares, "recomputed_tokens": result.recomputed,
    }  # fmt: skip
