"""Constraints and log-probabilities on the reference engine: with drafts, in batches, behind a break, and what is told.

The model is one of noise, whose logits depend on the tokens before alone; a campaign does the same at length.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from bench.campaigns.constraints import (
    BATCH,
    Case,
    find_problem,
    make_case,
    open_nano,
    pose_case,
    run_batch,
    run_schemas,
    run_suite,
)
from bench.noise import NoiseModel, open_noise
from bench.schemas import read_suite
from dsuf.checkpoint.forms import NANO
from dsuf.errors import InvalidRequest
from dsuf.node.engines import Model, open_model
from dsuf.recipe.grammar import write_json, write_regex
from dsuf.recipe.masks import Masks
from dsuf.recipe.render import Limits, render
from dsuf.reference.engine import ReferenceEngine
from dsuf.sched.endings import continue_turn
from dsuf.sched.ticket import TurnTicket
from dsuf.types import Allowed, Constraint, PrefillRange, Prompt, Sampling, StepPlan, StepResult, Turn
from tests.reference.rig import attach

LIMITS = Limits(context_tokens=4096)
SCHEMA = write_json('{"type":"object","properties":{"a":{"type":"string","maxLength":30},"b":{"type":"array"}}}')


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(NANO)


@pytest.fixture
def engine(model: Model) -> ReferenceEngine:
    return open_noise(model)


def turn_of(
    name: str, *, temperature: float = 0.0, constraint: Constraint | None = None, max_tokens: int = 60,
    logprobs: int | None = None, ids: tuple[int, ...] = (7, 8, 9),
) -> Turn:  # fmt: skip
    sampling = Sampling(temperature=temperature, top_p=1.0, seed=11, max_tokens=max_tokens, logprobs=logprobs)
    return Turn(id=name, prompt=Prompt(ids=ids), sampling=sampling, constraint=constraint)


def generate(engine: ReferenceEngine, *turns: Turn, drafts: int = 0) -> list[list[StepResult]]:
    """All results of each of `turns`, which run at the same time."""
    results: dict[str, list[StepResult]] = {}
    for turn in turns:
        attach(engine, turn)
        results[turn.id] = engine.run(StepPlan(prefill=(PrefillRange(turn.id, 0, len(turn.prompt.ids)),)))
    while going := tuple(name for name, part in results.items() if part[-1].finish is None):
        for result in engine.run(StepPlan(decode=going, drafts=drafts)):
            results[result.turn].append(result)
    for turn in turns:
        engine.detach(turn.id)
    return list(results.values())


def ids_of(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.ids]


def test_drafts_change_no_greedy_answer(engine: ReferenceEngine) -> None:
    """Masked or not, alone or beside others, with any number of drafts."""
    turns = [
        turn_of(f"t{i}", constraint=Constraint(grammar=SCHEMA) if i % 2 else None, ids=(i, 8, 9)) for i in range(6)
    ]
    alone = [ids_of(generate(engine, turn)[0]) for turn in turns]
    for drafts in (0, 1, 3, 5):
        together = generate(engine, *turns, drafts=drafts)
        assert [ids_of(results) for results in together] == alone
        if drafts:
            assert sum(result.accepted for results in together for result in results) > 0


class DeadEnd:
    """Allows anything but the end for `most` tokens, and nothing behind them."""

    def __init__(self, masks: Masks, most: int) -> None:
        self.any, self.end, self.left = masks.within_reasoning, masks.only_end, most

    def ask(self, ids: Sequence[int], drafts: Sequence[int]) -> "Future[Allowed]":
        self.left -= len(ids)
        over = self.left <= len(drafts)
        rows = (self.any,) * self.left + (self.end,) if over else (self.any,) * (len(drafts) + 1)
        answer: Future[Allowed] = Future()
        answer.set_result(Allowed(rows, "no text does" if over else None))
        return answer


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_a_reply_that_cannot_go_on_is_no_success(model: Model, engine: ReferenceEngine, drafts: int) -> None:
    """Wherever in a round that shows."""
    engine.open_mask = lambda _: DeadEnd(Masks(model.vocabulary, engine.facts.vocabulary), 9)
    turns = [turn_of(f"t{i}", constraint=Constraint(grammar="dead"), ids=(i, 8, 9)) for i in range(8)]
    for results in generate(engine, *turns, drafts=drafts):
        assert (len(ids_of(results)), results[-1].finish, bool(results[-1].fault)) == (9, "stop", True)
    (results,) = generate(engine, turn_of("cut", constraint=Constraint(grammar="dead"), max_tokens=9), drafts=drafts)
    assert (results[-1].finish, results[-1].fault) == ("length", None)


@pytest.mark.full
@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafted_output_has_the_masked_distribution(model: Model, rule: str) -> None:
    """Over many seeds the first tokens of drafted and plain turns are equally frequent."""
    counts = []
    for drafts in (0, 3):
        engine = open_noise(model)
        engine.speculation = type(engine.speculation)(rule=rule)
        seen: dict[tuple[int, ...], int] = {}
        for seed in range(300):
            turn = turn_of("t", temperature=1.0, constraint=Constraint(grammar=write_regex("[ab][cd][ef]")))
            turn = Turn(id="t", prompt=turn.prompt, constraint=turn.constraint,
                        sampling=Sampling(temperature=2.0, top_p=1.0, seed=seed, max_tokens=5))  # fmt: skip
            text = model.vocabulary.decode(ids_of(generate(engine, turn, drafts=drafts)[0]))
            seen[text] = seen.get(text, 0) + 1
        counts.append(seen)
    plain, drafted = counts
    keys = set(plain) | set(drafted)
    distance = sum(abs(plain.get(key, 0) - drafted.get(key, 0)) for key in keys) / 600
    assert len(keys) > 3 and distance < 0.12, (plain, drafted)


def test_a_turn_that_was_put_back_goes_on_in_its_grammar(engine: ReferenceEngine) -> None:
    turn = turn_of("t", constraint=Constraint(grammar=SCHEMA))
    whole = ids_of(generate(engine, turn)[0])
    ticket = TurnTicket(turn, 0.0, lambda *_: None)
    ticket.ids = whole[:5]
    rest = continue_turn(ticket)
    assert rest.constraint is not None and rest.constraint.spent == 5
    assert whole[:5] + ids_of(generate(engine, rest)[0]) == whole


def test_an_engine_without_masks_refuses_a_constraint(model: Model) -> None:
    engine = open_noise(model)
    engine.open_mask = None
    with pytest.raises(Exception, match="constraints"):
        engine.attach(turn_of("t", constraint=Constraint(grammar=SCHEMA)), range(1))


@pytest.mark.parametrize("constrained", [False, True])
def test_log_probabilities_are_the_models_own(engine: ReferenceEngine, constrained: bool) -> None:
    """They are those of the logits before mask and temperature; drafts and neighbours change none of them."""
    constraint = Constraint(grammar=SCHEMA) if constrained else None
    turns = [turn_of(name, constraint=constraint, logprobs=top, ids=(3, 8, len(name))) for name, top in
             (("a", 20), ("bb", 0), ("ccc", 4))]  # fmt: skip
    plain = [generate(engine, turn)[0] for turn in turns]
    for turn, results, drafted in zip(turns, plain, generate(engine, *turns, drafts=4), strict=True):
        rated = [one for result in results for one in result.logprobs]
        assert rated == [one for result in drafted for one in result.logprobs]
        assert len(rated) == len(ids_of(results)) and {len(top) for _, top in rated} == {turn.sampling.logprobs}
        known = list(turn.prompt.ids)
        for token, (logprob, top) in zip(ids_of(results), rated, strict=True):
            logits = _logits(engine, known)
            expected = logits - np.logaddexp.reduce(logits)
            assert logprob == pytest.approx(expected[token], abs=1e-9)
            likeliest = sorted(range(len(logits)), key=lambda id_: (-logits[id_], id_))[: turn.sampling.logprobs]
            assert [id_ for id_, _ in top] == likeliest
            assert [value for _, value in top] == pytest.approx(expected[likeliest].tolist(), abs=1e-9)
            known.append(token)


def _logits(engine: ReferenceEngine, known: list[int]) -> np.ndarray:
    noise = engine.model
    assert isinstance(noise, NoiseModel)
    cache = noise.new_cache()
    return np.float64(noise.logits(noise.forward([(cache, np.array(known))]), slice(-1, None))[0])


def test_generated_schemas_on_random_logits(engine: ReferenceEngine, model: Model) -> None:
    """The campaign's twin: a hundred of its two thousand schemas."""
    tally = run_schemas(engine, model, range(96), BATCH, "noise")
    assert tally.faults == [] and tally.done["answered"] + tally.done["called"] > 80


@pytest.mark.full
def test_generated_schemas_on_the_small_model(model: Model) -> None:
    tally = run_schemas(open_nano(model), model, range(50), 4, "nano")
    assert tally.faults == [] and tally.done["answered"] + tally.done["called"] > 30


def test_calls_that_messages_ask_for(engine: ReferenceEngine, model: Model) -> None:
    """Of any tool, with and without thinking with drafts, and of one: each reply is a block of calls."""
    kept = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    cases = []
    for number in range(16):
        choice = {"type": "tool", "name": "g"} if number % 4 == 3 else {"type": "any"}
        body = {
            "model": "deepseek-flash", "messages": [{"role": "user", "content": f"Go {number}."}], "max_tokens": 400,
            "tools": [{"name": name, "input_schema": kept} for name in "fgh"], "tool_choice": choice,
            "thinking": {"type": "enabled" if number % 2 == 0 else "disabled"},
        }  # fmt: skip
        rendered = render("messages", json.dumps(body).encode(), model.vocabulary, LIMITS, masks=model.masks)
        cases.append(Case({}, True, rendered, rendered.open_reader("msg_1", model.vocabulary)))
    run_batch(engine, cases[:8], 3)
    run_batch(engine, cases[8:], 0)
    replies = [json.loads(case.reader.fold()) for case in cases]
    whole = {number: reply for number, reply in enumerate(replies) if reply["stop_reason"] != "max_tokens"}
    assert len(whole) > 12
    for number, reply in whole.items():
        blocks = [block for block in reply["content"] if block["type"] != "thinking"]
        assert reply["stop_reason"] == "tool_use" and {block["type"] for block in blocks} == {"tool_use"}
        assert all(block["input"] in ({"n": 1}, {"n": 2}) for block in blocks)
        assert {block["name"] for block in blocks} <= ({"g"} if number % 4 == 3 else {"f", "g", "h"})


@pytest.mark.full
def test_the_public_suite_on_random_logits(engine: ReferenceEngine, model: Model) -> None:
    """Every schema of it is refused with a reason, or each reply that comes to its end follows it."""
    tally = run_suite(engine, model, BATCH, "suite")
    assert tally.faults == [] and tally.done["answered"] > 150
    assert not tally.done.keys() - {"answered", "refused", "cut by max_tokens"}


# What patterns of the notation cannot say: where leap seconds and the days of months are right, and one odd space.
BEYOND_PATTERNS = {"ecmascript-regex", "format/date", "format/date-time", "format/time"}


def test_the_public_suite_without_an_engine(model: Model) -> None:
    """No grammar takes a value that the suite says does not follow its schema, and most take those that do."""
    taken = {True: 0, False: 0}
    compiled = 0
    for number, case in enumerate(read_suite()):
        try:
            grammar = pose_case(number, model, case.schema).rendered.constraint
        except InvalidRequest as error:
            assert error.message
            continue
        assert grammar is not None
        compiled += 1
        wrong = [value for value in case.invalid if takes(model, grammar.grammar, value)]
        assert not wrong or case.group.removeprefix("optional/") in BEYOND_PATTERNS, (case, wrong)
        for value in case.valid:
            taken[takes(model, grammar.grammar, value)] += 1
    assert compiled > 190 and taken[True] > 10 * taken[False], (compiled, taken)


def takes(model: Model, grammar: str, value: object) -> bool:
    """Whether `value`, written without spaces, is whole under `grammar`."""
    ids = model.vocabulary.encode(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    matcher = model.masks.copy(grammar)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_the_judge_sees_a_broken_reply(engine: ReferenceEngine, model: Model) -> None:
    """A campaign that could not fail would show nothing."""
    case = make_case(2, model)
    [result] = run_batch(engine, [case], 0)
    whole = json.loads(case.reader.fold())["choices"][0]["message"]
    assert result.finish == "stop" and find_problem(case, whole) == ""
    number = pose_case(0, model, {"type": "number"})
    assert find_problem(number, {"content": "-4E999"}) == "" and find_problem(number, {"content": '"4"'})
    assert find_problem(case, {**whole, "content": "{"}) and find_problem(case, {**whole, "content": '{"no": 1}'})
