"""A recorded run against one run of all layers: only where nothing is rounded do they stay together to the end."""

from collections import defaultdict

import numpy as np

from dsuf.golden import tolerance
from dsuf.golden.choices import Choice, compare_experts, compare_selection
from dsuf.golden.folder import Case
from dsuf.golden.measure import Array, Distance
from dsuf.golden.session import Session
from dsuf.golden.trace import OUTPUTS, recorded_name
from dsuf.reference.batch import ForcedChoices

TIE = np.float32(1e-5)
"""Margin below which either index entry is right."""


def compare_whole(session: Session, case: Case) -> None:
    """Every output of every layer after one prefill of the trace's text."""
    seen = _observe(session, case)
    distances: dict[str, list[Distance]] = defaultdict(list)
    for name in case:
        output = name.rsplit(".", 1)[-1]
        if output in (*OUTPUTS, "h_after_engram") and name in seen:
            distances[output].append(Distance.between(seen[name], case[name]))
    for output, parts in distances.items():
        item = f"whole stack: {output}"
        session.report.judge_rows(case.name, session.flavour, item, Distance.pooled(parts), tolerance.FP32)
    _compare_choices(session, case, seen)


def _observe(session: Session, case: Case) -> dict[str, Array]:
    """What the run shows, by recorded names."""
    observer, cache, ids = ForcedChoices({}), session.model.new_cache(), case.whole("input_ids")
    session.model.forward([(cache, ids)], observer)
    seen: dict[str, Array] = {recorded_name(name): value for name, value in observer.seen.items()}
    for layer in session.config.kv_source_layers:
        rows = slice(len(ids) // session.config.ratio(layer))
        seen[f"layers.{layer}.compressed_kv"] = cache.entries[layer].read(rows)
        seen[f"layers.{layer}.index_k"] = cache.index_keys[layer].read(rows)
    return seen


def _compare_choices(session: Session, case: Case, seen: dict[str, Array]) -> None:
    """Experts and index entries: the same, but for ties."""
    choices: dict[str, list[Choice]] = defaultdict(list)
    for layer in range(session.config.n_layers):
        experts, topk, margin = (f"layers.{layer}.{name}" for name in ("router_indices", "index_topk", "index_margin"))
        if experts in case:
            router, v = session.model.layers[layer].moe.router, seen[f"layers.{layer}.ffn_in"]
            choices["router_indices"].append(compare_experts(router, v, case[experts], session.flavour))
        if topk in case and margin in case:
            entries = len(seen[f"layers.{session.config.kv_source(layer)}.index_k"])
            found = compare_selection(seen[topk], case.whole(topk), entries, case.single(margin) - TIE, None)
            choices["index_topk"].append(found)
    for name, parts in choices.items():
        Choice.pooled(parts).judge(session, case.name, f"whole stack: {name}")
