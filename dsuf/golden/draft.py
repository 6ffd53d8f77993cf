"""DSpark: the draft head on recorded context rows, and behind this engine's own backbone."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsuf.golden import tolerance
from dsuf.golden.folder import Case
from dsuf.golden.measure import Array, Distance, count_equal
from dsuf.golden.session import Session
from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.cache import SequenceCache
from dsuf.reference.draft import Block


class Drafts(NamedTuple):
    """Blocks drafted step by step, and the stages of the last one."""

    ids: I64  # [steps, 1 + block], the anchor first
    logits: F32  # [steps, block, vocabulary]
    confidence: F32  # [steps, block]
    stages: tuple[F32, ...]  # [block, s, dim] each

    @classmethod
    def collected(cls, anchors: list[int], blocks: list[Block]) -> "Drafts":
        """The blocks of one sequence after each of its `anchors`."""
        ids = np.stack([np.append(anchor, block.ids[0]) for anchor, block in zip(anchors, blocks, strict=True)])
        logits = np.concatenate([block.logits for block in blocks])
        return cls(ids, logits, np.concatenate([block.confidence for block in blocks]), blocks[-1].stages)


class DraftComparison:
    """The comparison of the draft case in one flavour."""

    def __init__(self, session: Session, case: Case) -> None:
        self.session, self.case, self.report = session, case, session.report
        self.draft = session.load_draft()
        self.ids, self.start = case.whole("input_ids"), case.number("prefill_len")

    def run(self) -> None:
        """Drafts from recorded rows, then drafts behind the own backbone."""
        inputs = [self.session.has(self.case, name) for name in ("prefill_main_hidden", "main_hidden", "main_next")]
        if all(inputs) and self.start < len(self.ids):
            self._judge_taught(self._draft_taught())
            self._compare_free()

    def _recorded(self, name: str) -> Array:
        return self.case[f"{name}.{self.session.flavour}"]

    def _draft_taught(self) -> Drafts:
        """Drafts from the recorded context rows, after the recorded anchors."""
        cache = self.session.model.new_cache()
        self.draft.feed(cache, 0, self._recorded("prefill_main_hidden").astype(np.float32))
        anchors = self._recorded("main_next").tolist()
        taps = self._recorded("main_hidden").astype(np.float32)
        blocks = [self._propose(cache, step, anchor, taps[step : step + 1]) for step, anchor in enumerate(anchors)]
        return Drafts.collected(anchors, blocks)

    def _propose(self, cache: SequenceCache, step: int, anchor: int, taps: F32) -> Block:
        """The block after `anchor`, which the backbone chose at decode step `step`."""
        position = self.start + step
        self.draft.feed(cache, position, taps)
        return self.draft.propose([(cache, position + 1, anchor)])

    def _judge_taught(self, drafts: Drafts) -> None:
        """All that the head computes is near the recorded, as long as it drafts the recorded ids."""
        session, limit = self.session, tolerance.FP32 if self.session.exact else tolerance.DRAFT
        judged = np.ones_like(drafts.ids[:, 1:], np.bool_)
        if session.has(self.case, "draft_ids"):
            judged = self._judge_taught_ids(drafts.ids, self._recorded("draft_ids"))
        # A slot behind another draft than the recorded has another bias: it is left out.
        if session.has(self.case, "draft_logits"):
            logits = Distance.between(drafts.logits[judged], self._recorded("draft_logits")[judged])
            self.report.judge_rows(self.case.name, session.flavour, "taught: draft_logits", logits, limit)
        if session.has(self.case, "confidence"):
            recorded = self._recorded("confidence")
            confidence = Distance.between(np.where(judged, drafts.confidence, recorded), recorded)
            self.report.judge_rows(self.case.name, session.flavour, "taught: confidence", confidence, limit)
        for stage, own in enumerate(drafts.stages):
            if session.has(self.case, name := f"last_step_stage{stage}_h"):
                distance = Distance.between(own, self._recorded(name))
                self.report.judge_rows(self.case.name, session.flavour, f"taught: {name}", distance, limit)

    def _judge_taught_ids(self, own: I64, recorded: Array) -> NDArray[np.bool_]:
        """A row for the drafts; which of them have the recorded ones before them [steps, block]."""
        share = 1.0 if self.session.exact else tolerance.ARGMAX_SHARE
        equal, total = count_equal(own, recorded)
        shown, holds = f"{equal} of {total} equal", equal >= share * total
        self.report.judge(self.case.name, self.session.flavour, "taught: draft_ids", shown, f"{share:.0%} equal", holds)
        return _follows(own, recorded)

    def _compare_free(self) -> None:
        """The same with this engine's own context rows and anchors."""
        session, case = self.session, self.case
        cache, logits, prefill_taps = session.prefill(self.ids[: self.start])
        self.draft.feed(cache, 0, prefill_taps)
        anchors, taps, blocks = [], [], []
        for step, token in enumerate(self.ids[self.start :]):
            step_logits, step_taps = session.step(cache, int(token))
            anchors.append(int(step_logits.argmax()))
            taps.append(step_taps)
            blocks.append(self._propose(cache, step, anchors[-1], step_taps))
        if session.has(case, "prefill_next"):
            session.judge_choices(case, "prefill_next", logits[-1:].argmax(axis=1), self._recorded("prefill_next"))
        session.judge_choices(case, "main_next", np.array(anchors), self._recorded("main_next"))
        session.judge_hidden(case, "prefill_main_hidden", prefill_taps)
        session.judge_hidden(case, "main_hidden", np.concatenate(taps))
        if session.has(case, "draft_ids"):
            self._judge_free_ids(Drafts.collected(anchors, blocks).ids, self._recorded("draft_ids"))

    def _judge_free_ids(self, own: I64, recorded: Array) -> None:
        """Each draft as long as all before it are the recorded ones, the anchor too; the rest follows another text."""
        judged = np.ones_like(own[:, 1:], np.bool_) if self.session.exact else _follows(own, recorded)
        self.session.judge_choices(self.case, "draft_ids", own[:, 1:][judged], recorded[:, 1:][judged])


def _follows(own: I64, recorded: Array) -> NDArray[np.bool_]:
    """Where all before a slot, the anchor too, are the recorded ones [steps, block]; the arguments hold the anchor."""
    return np.logical_and.accumulate(own == recorded, axis=1)[:, :-1]
