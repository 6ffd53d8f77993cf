"""Whole runs of the backbone: prefill of texts and prefixes, decode token by token, greedy choices, chunks."""

import numpy as np

from dsuf.golden import tolerance
from dsuf.golden.folder import Case
from dsuf.golden.measure import Distance
from dsuf.golden.session import Session
from dsuf.reference.arithmetic import F32, I64

CHUNK = 7
"""Positions of a prefill chunk: odd, so that groups of two are cut, and no divisor of a window."""


def compare_text(session: Session, case: Case) -> None:
    """Logits at every position of one prefill, and the draft head's input where the file has it."""
    present = [name for name in _results(case) if session.has(case, name)]
    if not present:
        return
    _, logits, taps = session.prefill(case.whole("input_ids"))
    if "logits" in present:
        session.judge_logits(case, "logits", logits)
    if "main_hidden" in present:
        session.judge_hidden(case, "main_hidden", taps)


def _results(case: Case) -> list[str]:
    """The results that `case` has in any flavour."""
    return sorted({name.rsplit(".", 1)[0] for name in case if "." in name})


def compare_prefixes(session: Session, case: Case) -> None:
    """Logits of the last position of prefixes, each a prefill of its own."""
    ids = case.whole("input_ids")
    if session.has(case, "last_logits"):
        last = [session.prefill(ids[:length])[1][-1:] for length in case.whole("prefix_lens")]
        session.judge_logits(case, "last_logits", last)


def compare_decode(session: Session, case: Case) -> None:
    """Decode with own index keys and as released, and the same positions out of one prefill."""
    ids, start = case.whole("input_ids"), case.number("prefill_len")
    if session.has(case, "logits.own_keys"):
        session.judge_logits(case, "logits.own_keys", _decode(session, ids, start))
    if session.on_device:
        session.report.set_apart(case.name, session.flavour, "logits.as_released", "not compared", "reference only")
    elif session.has(case, "logits.as_released"):
        with session.released_keys():
            session.judge_logits(case, "logits.as_released", _decode(session, ids, start))
    if session.has(case, "logits.full_prefill"):
        session.judge_logits(case, "logits.full_prefill", session.prefill(ids)[1][start - 1 :])


def _decode(session: Session, ids: I64, start: int) -> list[F32]:
    """Logits of position `start` - 1 out of a prefill, then of each later one."""
    cache, logits, _ = session.prefill(ids[:start])
    return [logits[-1:], *(session.step(cache, token)[0] for token in ids[start:])]


def compare_greedy(session: Session, case: Case) -> None:
    """The greedy continuation: each choice after the recorded ones, hence free-running up to the first that differs."""
    if not session.has(case, "greedy_ids"):
        return
    recorded = case.whole(f"greedy_ids.{session.flavour}")
    cache, prompt_logits, _ = session.prefill(case.whole("prompt_ids"))
    logits = np.concatenate([prompt_logits[-1:], *(session.step(cache, token)[0] for token in recorded[:-1])])
    own = logits.argmax(axis=1)
    session.judge_choices(case, "greedy_ids", own, recorded)
    if session.has(case, "top1_top2_gap"):
        _judge_gaps(session, case, logits, own, recorded)


def _judge_gaps(session: Session, case: Case, logits: F32, own: I64, recorded: I64) -> None:
    """In `fp32` the margins themselves; else the first choice that differs must have had a small one."""
    gaps, size = case.single(f"top1_top2_gap.{session.flavour}"), np.sqrt(np.mean(logits**2, axis=1))
    if session.exact:
        best = np.sort(logits, axis=1)[:, -2:]
        # A margin is a small difference of large numbers: its error is one of the logits.
        errors = np.abs(best[:, 1] - best[:, 0] - gaps) / np.abs(best).max(axis=1)
        distance = Distance(errors.astype(np.float64), errors == 0)
        session.report.judge_rows(case.name, session.flavour, "top1_top2_gap", distance, tolerance.FP32)
        return
    different = np.flatnonzero(own != recorded)
    if not len(different):
        session.report.judge(case.name, session.flavour, "top1_top2_gap", "no choice differs", "", True)
        return
    first = int(different[0])
    limit = tolerance.GREEDY_GAP * max(1.0, float(size[first]))
    shown = f"choice {first} differs, margin {gaps[first]:.2f}"
    holds = bool(gaps[first] <= limit)
    session.report.judge(case.name, session.flavour, "top1_top2_gap", shown, f"margin within {limit:.2f}", holds)


def compare_chunks(session: Session, case: Case) -> None:
    """A prefill in chunks leaves the bytes and the logits of a whole one, in every arithmetic."""
    ids = case.whole("input_ids")
    (whole_cache, whole, _), (cache, logits, _) = session.prefill(ids), session.prefill(ids, CHUNK)
    equal = cache.global_bytes() == whole_cache.global_bytes(), bool((logits == whole).all())
    shown = "bytes {}, logits {}".format(*("equal" if same else "differ" for same in equal))
    session.report.judge(
        case.name, session.flavour, f"chunks of {CHUNK} = whole", shown, "equal to the bit", all(equal)
    )


def compare_replay(session: Session, case: Case) -> None:
    """A replayed prefill in chunks equals a whole one; how far its last position is from the exact one is shown."""
    ids = case.whole("input_ids")
    (whole_cache, whole), (cache, logits) = session.replay(ids), session.replay(ids, CHUNK)
    equal = cache.global_bytes() == whole_cache.global_bytes() and bool((logits == whole).all())
    shown = "equal" if equal else "differ"
    item = f"replay in chunks of {CHUNK} = whole replay"
    session.report.judge(case.name, session.flavour, item, f"bytes and logits {shown}", "equal to the bit", equal)
    exact = session.prefill(ids)[1][-1:]
    distance = Distance.between(whole, exact)
    tokens = f"token {whole.argmax()}, exact {exact.argmax()}"
    session.report.show(
        case.name,
        session.flavour,
        "replay: last position",
        f"{tokens}, distance {distance.largest:.1e}",
        "for information",
    )
