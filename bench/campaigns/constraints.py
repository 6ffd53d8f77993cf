"""Generated JSON schemas on an engine of random logits: every reply that comes to its end must follow its schema.

The engine is the reference's, with its masks, its drafts and its batches, over a model of noise. Batches of 16 take
turns: without drafts and with three and five; every second reply thinks first. A part of the schemas is that of a tool
which must be called. The public test suite of JSON Schema is asked for, too: what of it cannot be compiled is refused
with a reason. The small model answers some of the generated ones; on a GPU all that are asked for, and nothing else is
done then.

    python bench/campaigns/constraints.py [--schemas 2000] [--nano 50] [--cuda 0] [--publish]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jsonschema_rs

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.campaigns.tally import Tally
from bench.noise import open_noise
from bench.report import publish
from bench.schemas import Schema, make_schema, read_suite
from dsuf.checkpoint.forms import NANO
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from dsuf.errors import InvalidRequest
from dsuf.node.engines import Model, open_model
from dsuf.recipe.reader import Reader
from dsuf.recipe.render import Limits, Rendered, render
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.speculate import Speculation
from dsuf.types import CacheLayout, EngineFacts, PrefillRange, StepPlan, StepResult, Turn, Usage

BATCH, REPLY_TOKENS, CONTEXT_TOKENS = 16, 400, 4096
DRAFTS = (0, 3, 5)
TOOL_EVERY = 5
OUTCOMES = ("answered", "called", "refused", "cut by max_tokens")
LARGEST = sys.float_info.max


class Runs(Protocol):
    """An engine that runs a plan here and now."""

    facts: EngineFacts
    layout: CacheLayout

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """As `Engine.attach`."""

    def detach(self, turn: str) -> None:
        """As `Engine.detach`."""

    def run(self, plan: StepPlan) -> list[StepResult]:
        """What comes of `plan`."""


class StepByStep:
    """The CUDA engine as one that runs a plan here and now."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self.facts, self.layout = engine, engine.facts, engine.layout
        self.attach, self.detach = engine.attach, engine.detach

    def run(self, plan: StepPlan) -> list[StepResult]:
        """What comes of `plan`."""
        return self._engine.run(plan)[0]


class Case(NamedTuple):
    """A schema, what its request was rendered to, and what reads its reply."""

    schema: Schema
    called: bool
    rendered: Rendered
    reader: Reader


def make_case(number: int, model: Model) -> Case:
    """Request `number`: an answer that follows a schema, or a call whose one argument does."""
    return pose_case(number, model, make_schema(number), called=number % TOOL_EVERY == 0)


def pose_case(number: int, model: Model, schema: Any, *, called: bool = False) -> Case:
    """The request for what follows `schema`; raises `InvalidRequest` where it cannot be compiled."""
    body: dict[str, Any] = {
        "model": "deepseek-flash", "messages": [{"role": "user", "content": f"Give me some json: {number}."}],
        "temperature": 1, "seed": number, "max_tokens": REPLY_TOKENS,
        "thinking": {"type": "enabled" if number % 2 and not called else "disabled"},
    }  # fmt: skip
    if called:
        whole = {
            "type": "object",
            "properties": {"value": schema},
            "required": ["value"],
            "additionalProperties": False,
        }
        if "$defs" in schema:
            whole["$defs"] = schema["$defs"]
        tool = {"name": "give", "parameters": whole}
        body |= {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    limits = Limits(context_tokens=CONTEXT_TOKENS)
    rendered = render("chat", json.dumps(body).encode(), model.vocabulary, limits, masks=model.masks)
    return Case(schema, called, rendered, rendered.open_reader(f"case-{number}", model.vocabulary))


def run_batch(engine: Runs, cases: Sequence[Case], drafts: int) -> list[StepResult]:
    """Answer `cases` at the same time; the last result of each."""
    last: dict[str, StepResult] = {}
    readers = {f"turn{place}": case.reader for place, case in enumerate(cases)}

    def take(results: Iterable[StepResult]) -> None:
        for result in results:
            readers[result.turn].feed(result.ids)
            last[result.turn] = result

    pages = engine.layout.pages_for(CONTEXT_TOKENS)
    for place, (name, case) in enumerate(zip(readers, cases, strict=True)):
        rendered, case_pages = case.rendered, range(place * pages, (place + 1) * pages)
        turn = Turn(id=name, prompt=rendered.prompt, sampling=rendered.sampling, constraint=rendered.constraint)
        engine.attach(turn, case_pages)
        case.reader.open(Usage(computed_tokens=len(rendered.prompt.ids)))
        take(engine.run(StepPlan(prefill=(PrefillRange(name, 0, len(rendered.prompt.ids)),))))
    while going := tuple(name for name, result in last.items() if result.finish is None):
        take(engine.run(StepPlan(decode=going, drafts=drafts)))
    for name, reader in readers.items():
        reader.finish(last[name].finish or "length")
        engine.detach(name)
    return list(last.values())


def judge(case: Case, result: StepResult, name: str, tally: Tally) -> None:
    """Count how the reply came out."""
    whole = json.loads(case.reader.fold())
    choice, usage = whole["choices"][0], whole["usage"]
    tally.completion_tokens += usage["completion_tokens"]
    if result.fault is not None:
        tally.fault(name, f"{result.fault}: {case.schema}")
    elif result.finish == "length":
        tally.count("cut by max_tokens" if choice["finish_reason"] == "length" else "cut, said to be whole")
    elif problem := find_problem(case, choice["message"]):
        tally.fault(name, f"{problem}: {case.schema}, {choice['message']}")
    else:
        tally.count("called" if case.called else "answered")


def find_problem(case: Case, message: dict[str, Any]) -> str:
    """Why a reply does not follow its schema; empty where it does."""
    try:
        if not case.called:
            _validate(_read(message["content"]), case.schema)
        for call in message.get("tool_calls", ()):
            _validate(_read(call["function"]["arguments"])["value"], case.schema)
    except (jsonschema_rs.ValidationError, ValueError, KeyError) as error:
        return f"{type(error).__name__} {str(error).splitlines()[0]}"
    return "" if not case.called or message.get("tool_calls") else "no call"


def _read(text: str) -> Any:
    """The value that `text` is. JSON's numbers may be larger than a float, where the validator sees none."""
    return json.loads(text, parse_float=lambda digits: max(-LARGEST, min(float(digits), LARGEST)))


def _validate(value: object, schema: Schema) -> None:
    jsonschema_rs.Draft202012Validator(schema).validate(value)


def run_schemas(engine: Runs, model: Model, numbers: Sequence[int], batch: int, name: str) -> Tally:
    """Answer the requests `numbers` in batches."""
    tally = Tally()
    for first in range(0, len(numbers), batch):
        cases = [make_case(number, model) for number in numbers[first : first + batch]]
        drafts = min(DRAFTS[first // batch % len(DRAFTS)], engine.facts.max_drafts)
        for case, result in zip(cases, run_batch(engine, cases, drafts), strict=True):
            judge(case, result, f"{name}, {drafts} drafts", tally)
    return tally


def run_suite(engine: ReferenceEngine, model: Model, batch: int, name: str) -> Tally:
    """Answer what can be compiled of the public suite, in batches; the rest must be refused with a reason."""
    tally, cases = Tally(), []
    for number, one in enumerate(read_suite()):
        try:
            cases.append(pose_case(number, model, one.schema))
        except InvalidRequest as error:
            tally.count("refused" if error.message and error.status == 400 else "refused without a reason")
    for first in range(0, len(cases), batch):
        part, drafts = cases[first : first + batch], DRAFTS[first // batch % len(DRAFTS)]
        for case, result in zip(part, run_batch(engine, part, drafts), strict=True):
            judge(case, result, f"{name}, {drafts} drafts", tally)
    return tally


def open_nano(model: Model) -> ReferenceEngine:
    """The small model."""
    return ReferenceEngine.load(
        NANO, context_tokens=CONTEXT_TOKENS, max_turns=4, prefill="exact", speculation=Speculation(),
        open_mask=model.masks.open,
    )  # fmt: skip


def open_cuda(model: Model) -> StepByStep:
    """The small model on this machine's GPU."""
    setup = Setup(context_tokens=CONTEXT_TOKENS, max_turns=BATCH)
    return StepByStep(CudaEngine.load(NANO, setup, "exact", open_mask=model.masks.open))


def main() -> int:
    """Run the campaign; 1 if a reply broke its schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", metavar="N", type=int, default=2000, help="schemas on random logits")
    parser.add_argument("--nano", metavar="N", type=int, default=50, help="schemas on the small model")
    parser.add_argument("--cuda", metavar="N", type=int, default=0, help="schemas on the small model on a GPU, alone")
    parser.add_argument("--publish", action="store_true", help="keep the figures in bench/results")
    args = parser.parse_args()
    model, rows = open_model(NANO), []
    noise = open_noise(model, max_turns=BATCH)
    on_cpu = (
        ("random logits", lambda: run_schemas(noise, model, range(args.schemas), BATCH, "noise")),
        ("random logits, public suite", lambda: run_suite(noise, model, BATCH, "suite")),
        ("dsuf-nano", lambda: run_schemas(open_nano(model), model, range(args.nano), 4, "nano")),
    )
    on_gpu = ("dsuf-nano on a GPU", lambda: run_schemas(open_cuda(model), model, range(args.cuda), BATCH, "cuda"))
    for name, run in (on_gpu,) if args.cuda else on_cpu:
        begun = time.monotonic()
        tally = run()
        rows.append(
            {"engine": name, "schemas": tally.done.total() + tally.fault_count,
             **{outcome: tally.done[outcome] for outcome in OUTCOMES}, "broken": tally.fault_count,
             "tokens": tally.completion_tokens, "seconds": round(time.monotonic() - begun, 1)}
        )  # fmt: skip
        print(rows[-1], *tally.faults, sep="\n")
    if args.publish:
        publish("constraints-cuda" if args.cuda else "constraints", rows)
    return int(any(row["broken"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
