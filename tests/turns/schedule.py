"""What happens in one run, as data: an engine, clients, faults. A seed draws one; any part can be left out."""

import random
from typing import Literal

import msgspec

Way = Literal["abort", "stop"]
Broken = Literal["raises", "slow"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The machine: pages of the engine, blocks of the arena, bounds of the scheduler, how unsteady threads and calls
    are (seconds at most), whether drafts are audited, and whether another node of the same kind computes prompts."""

    pages: int = 30
    page_tokens: int = 8
    blocks: int = 40
    max_turns: int = 3
    replay_tokens: int = 0
    spare: int = 3
    drafts: int = 0
    stop_every: int = 0
    chunk_tokens: int = 16
    queue_limit: int = 100
    unsteady_s: float = 0.0
    audits: bool = False
    hands_over: bool = False


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a client: how many tokens of its stem (the first visit) or of what was said so far it keeps, own ones
    after that, and how it leaves early: after so many results, or so many seconds after it came."""

    kept_tokens: int
    own_tokens: int
    max_tokens: int
    temperature: float = 0.0
    timeout_s: float | None = None
    leaves_after_results: int | None = None
    leaves_after_s: float | None = None
    leaves_by: Way = "abort"
    pause_s: float = 0.0


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation: it comes at `at_s` and makes its visits one after another."""

    number: int
    at_s: float
    stem: int
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    visits: tuple[Visit, ...] = ()


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The `nth` call of a method of the engine, counted from 0, raises, or takes `seconds`. Methods of the other node's
    engine are `far ...`; `offer`, `read`, `release` and `leave` are what is asked of it."""

    call: str
    nth: int
    kind: Broken
    seconds: float = 0.0


class Meddling(msgspec.Struct, frozen=True, kw_only=True):
    """At `at_s` a bit of something that is kept changes (or one of everything, which the device forgets), everything is
    flushed, or the device forgets all prefixes."""

    at_s: float
    kind: Literal["flip", "ruin", "flush", "forget"]
    pick: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """One run; at `stops_at_s` the server stops."""

    seed: int
    setting: Setting
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...] = ()
    meddlings: tuple[Meddling, ...] = ()
    stops_at_s: float | None = None


def draw(seed: int, clients: int = 5) -> Schedule:
    """The schedule of a seed. A third of them have no faults: then nothing but its own limits may end a turn."""
    rng = random.Random(seed)
    setting = _draw_setting(rng)
    span_s, stems = rng.choice((0.0, 0.02, 0.05, 0.2)), rng.choice((1, 1, 2))
    faulty = seed % 3 > 0
    return Schedule(
        seed=seed, setting=setting,
        clients=tuple(_draw_client(rng, number, span_s, stems) for number in range(rng.randint(2, clients))),
        faults=tuple(_draw_fault(rng, setting.hands_over) for _ in range(rng.randint(1, 4))) if faulty else (),
        meddlings=tuple(_draw_meddling(rng, span_s) for _ in range(rng.choice((0, 1, 2)))),
        stops_at_s=rng.random() * (span_s + 0.1) if rng.random() < 0.1 else None,
    )  # fmt: skip


def _draw_setting(rng: random.Random) -> Setting:
    page_tokens = rng.choice((2, 4, 8))
    return Setting(
        pages=rng.choice((2, 3, 4, 8)) * 64 // page_tokens, page_tokens=page_tokens,
        blocks=rng.choice((0, 6, 15, 40, 120)), max_turns=rng.choice((1, 2, 3, 4)),
        replay_tokens=rng.choice((0, 0, 6, 8, 11)), spare=rng.choice((0, 1, 3)),
        drafts=rng.choice((0, 1, 3)), stop_every=rng.choice((0, 10, 40)), chunk_tokens=rng.choice((3, 8, 16, 64)),
        queue_limit=rng.choice((1, 100, 100)), unsteady_s=rng.choice((0.0, 0.001, 0.004)),
        audits=rng.random() < 0.3, hands_over=rng.random() < 0.3,
    )  # fmt: skip


def _draw_client(rng: random.Random, number: int, span_s: float, stems: int) -> Client:
    return Client(
        number=number, at_s=rng.random() * span_s, stem=rng.randrange(stems), salt=rng.choice(("", "", "", "x")),
        tenant=rng.choice("aab"), priority=rng.choice((-1, 0, 0, 0, 1)),
        visits=tuple(_draw_visit(rng) for _ in range(rng.choice((1, 1, 2, 3)))),
    )  # fmt: skip


def _draw_visit(rng: random.Random) -> Visit:
    leaves = rng.choice(("", "", "", "", "results", "seconds"))
    return Visit(
        kept_tokens=rng.choice((rng.randint(0, 40), 31, 32, 40)), own_tokens=rng.randint(1, 5),
        max_tokens=140 if rng.random() < 0.02 else rng.randint(1, 10), temperature=rng.choice((0.0, 0.0, 0.9)),
        timeout_s=rng.choice((None,) * 9 + (0.01, 0.03, 0.06)),
        leaves_after_results=rng.randint(0, 6) if leaves == "results" else None,
        leaves_after_s=rng.random() * 0.05 if leaves == "seconds" else None,
        leaves_by=rng.choice(("abort", "stop")), pause_s=rng.choice((0.0, 0.0, 0.02)),
    )  # fmt: skip


def _draw_fault(rng: random.Random, hands_over: bool) -> Fault:
    call = rng.choice(("step", "resume", "resume", "read_state", "read_pages", "write_pages", "write_pages"))
    if hands_over and rng.random() < 0.7:
        call = rng.choice(("far step", "far read_state", "far read_pages", "offer", "read", "release", "leave"))
    kind: Broken = rng.choice(("raises", "slow"))
    seconds = rng.choice((0.03, 0.2, 0.2)) if not call.endswith("step") else rng.choice((0.03, 0.2, 3.0))
    return Fault(call=call, nth=rng.randint(0, 40 if call == "step" else 4), kind=kind, seconds=seconds)


def _draw_meddling(rng: random.Random, span_s: float) -> Meddling:
    kind: Literal["flip", "ruin", "flush", "forget"] = rng.choice(("flip", "ruin", "ruin", "flush", "forget"))
    return Meddling(at_s=rng.random() * (span_s + 0.08), kind=kind, pick=rng.randrange(1 << 30))
