"""The course of a training: stages, learning rate, gate."""

from collections import Counter

from bench.nano.stages import (
    DECAY_FROM,
    FULL,
    GATE_CHECKS,
    GATE_SHARE,
    LAST_PACE,
    LATER,
    LESSON,
    RECALL,
    SELECTION,
    WARM_STEPS,
    Gate,
    find_lesson_pace,
    find_pace,
    find_stage,
    passes,
    pick_pass,
)


def test_shares_of_every_stage_add_up() -> None:
    for stage in (RECALL, *LATER):
        assert abs(sum(share for _, share in stage.shares) - 1) < 1e-9


def test_recall_holds_until_its_gate_opens_or_its_time_is_up() -> None:
    assert find_stage(0.0, gate_open=False) is RECALL
    assert find_stage(0.0, gate_open=True).name == "first mix"
    assert find_stage(GATE_SHARE, gate_open=False).name == "first mix"
    assert find_stage(0.3, gate_open=True).name == "mix"
    assert find_stage(0.8, gate_open=True).name == "quantised"
    assert find_stage(1.0, gate_open=True).name == "selection"


def test_only_the_last_stage_has_the_draft_and_the_quantisers() -> None:
    kinds = {
        stage.name: {(item.mode.quantised, item.mode.draft) for item, _ in stage.shares if item != LESSON}
        for stage in LATER
    }
    assert kinds.pop("quantised") == {(True, True)}
    assert kinds.pop("selection") == set()
    assert all(kind == {(False, False)} for kind in kinds.values())


def test_passes_are_named_once() -> None:
    assert len(passes()) == len(set(passes())) == len({item.label for item in passes()}) == 8


def test_steps_are_drawn_by_share_and_repeat() -> None:
    stage = LATER[-2]
    drawn = [pick_pass(stage, step, seed=5) for step in range(4000)]
    assert drawn == [pick_pass(stage, step, seed=5) for step in range(4000)]
    assert drawn != [pick_pass(stage, step, seed=6) for step in range(4000)]
    counts = Counter(drawn)
    for item, share in stage.shares:
        assert abs(counts[item] / 4000 - share) < 0.03
    assert {item.mode for item in counts} >= {FULL}


def test_pace_warms_up_stays_and_falls_to_its_end() -> None:
    assert find_pace(0, 0.0) == 1 / WARM_STEPS
    assert find_pace(WARM_STEPS, DECAY_FROM) == 1.0
    assert abs(find_pace(10_000, SELECTION.start) - LAST_PACE) < 1e-12
    assert find_pace(10_000, 2.0) == find_pace(10_000, SELECTION.start)
    falling = [find_pace(10_000, share / 100) for share in range(50, 101)]
    assert falling == sorted(falling, reverse=True)


def test_lessons_keep_their_pace_until_they_are_alone() -> None:
    assert find_lesson_pace(SELECTION.start) == 1.0
    assert LAST_PACE < find_lesson_pace((1 + SELECTION.start) / 2) < 1.0
    assert abs(find_lesson_pace(1.0) - LAST_PACE) < 1e-12 and find_lesson_pace(1.5) == find_lesson_pace(1.0)


def test_gate_wants_good_checks_in_a_row_and_stays_open() -> None:
    gate = Gate()
    for right in [0.98] * (GATE_CHECKS - 1) + [0.9] + [0.98] * (GATE_CHECKS - 1):
        assert not gate.check(right)
    assert gate.check(0.99)
    assert gate.check(0.1)
