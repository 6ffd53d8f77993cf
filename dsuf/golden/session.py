"""What the comparisons of one flavour share: a loaded model, where results go, and the pool of arg-max choices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dsuf.checkpoint.shards import Checkpoint
from dsuf.golden import tolerance
from dsuf.golden.device import DeviceModel
from dsuf.golden.device_draft import DeviceDraft
from dsuf.golden.folder import Case, Folder
from dsuf.golden.measure import Array, Distance
from dsuf.golden.report import Report
from dsuf.reference.arithmetic import F32, I64, ArithmeticName, by_name
from dsuf.reference.cache import SequenceCache
from dsuf.reference.draft import Draft
from dsuf.reference.loader import load_model
from dsuf.reference.weights import WeightSource


class Session:
    """The model of `folder` in one arithmetic, and judgements in the way of that arithmetic."""

    def __init__(self, folder: Folder, flavour: ArithmeticName, report: Report, engine: str = "reference") -> None:
        """Load the model, for `engine` `cuda` on the GPU; raises `CheckpointError`, `CommandError` or `DeviceError`."""
        self.folder, self.config, self.flavour, self.report = folder, folder.config, flavour, report
        self.on_device = engine == "cuda"
        self.model = (
            DeviceModel(folder.checkpoint) if self.on_device else load_model(folder.checkpoint, by_name(flavour))
        )
        self.exact = flavour == "fp32"
        self._equal = self._choices = 0

    def load_draft(self) -> Draft:
        """The draft head of the model."""
        if isinstance(self.model, DeviceModel):
            return DeviceDraft(self.model)
        return Draft(WeightSource(Checkpoint.open(self.folder.checkpoint).tensor), self.model)

    def has(self, case: Case, name: str) -> bool:
        """Whether `case` has tensor `name` in this flavour; a row says so if it has nothing of this flavour."""
        there = f"{name}.{self.flavour}" in case
        if not there and not any(one.endswith(f".{self.flavour}") for one in case):
            self.report.set_apart(case.name, self.flavour, name, "absent")
        return there

    def prefill(self, ids: I64, chunk: int | None = None) -> tuple[SequenceCache, F32, F32]:
        """Run `ids` [T] through a new cache, whole or in chunks.

        Returns the cache, logits [T, vocabulary] and taps [T, targets · dim].
        """
        cache, logits, taps = self.model.new_cache(), [], []
        for start in range(0, len(ids), chunk or len(ids)):
            output = self.model.forward([(cache, ids[start : start + (chunk or len(ids))])])
            logits.append(self.model.logits(output, slice(None)))
            taps.append(output.taps)
        return cache, np.concatenate(logits), np.concatenate(taps)

    def replay(self, ids: I64, chunk: int | None = None) -> tuple[SequenceCache, F32]:
        """Replay `ids` [T] into a new cache, whole or in chunks: the cache and the last logits [1, vocabulary]."""
        cache = self.model.new_cache()
        while True:
            part = ids[cache.length : cache.length + (chunk or len(ids))]
            output = self.model.prefill_replay(cache, part, last=cache.length + len(part) == len(ids))
            if output is not None:
                return cache, self.model.logits(output, slice(-1, None))

    def step(self, cache: SequenceCache, token: int) -> tuple[F32, F32]:
        """Decode one token: its logits [1, vocabulary] and taps [1, targets · dim]."""
        output = self.model.forward([(cache, np.array([token], np.int64))])
        return self.model.logits(output, slice(None)), output.taps

    @contextmanager
    def released_keys(self) -> Iterator[None]:
        """Within, index keys in decode are those that the released code scores against."""
        attentions = [layer.attention for layer in self.model.layers]
        for attention in attentions:
            attention.own_keys = False
        try:
            yield
        finally:
            for attention in attentions:
                attention.own_keys = True

    def judge_logits(self, case: Case, name: str, own: Sequence[F32] | F32) -> None:
        """Logits after a whole stack: their error in `fp32`, else their arg-max."""
        rows = np.concatenate(own) if isinstance(own, Sequence) else own
        recorded = case[f"{name}.{self.flavour}"]
        distance = Distance.between(rows, recorded)
        if self.exact:
            self.report.judge_rows(case.name, self.flavour, name, distance, tolerance.FP32)
        else:
            self.judge_choices(case, name, rows.argmax(axis=1), recorded.argmax(axis=1), f", error {distance}")

    def judge_choices(self, case: Case, name: str, own: Array, recorded: Array, shown: str = "") -> None:
        """Arg-max choices after a whole stack.

        In `fp32` all are equal; else they join the pool, and a case of many positions has a floor of its own.
        """
        if self.exact:
            self.report.judge_equal(case.name, self.flavour, name, own, recorded)
            return
        equal, total = int(np.count_nonzero(own == recorded)), recorded.size
        self._equal, self._choices = self._equal + equal, self._choices + total
        text = f"{equal} of {total}{shown}"
        if total < tolerance.CASE_POSITIONS:
            self.report.show(case.name, self.flavour, name, text, "in the pool")
        else:
            limit = f"arg-max equal in {tolerance.CASE_SHARE:.0%}; the rest is pooled"
            self.report.judge(case.name, self.flavour, name, text, limit, equal >= tolerance.CASE_SHARE * total)

    def judge_hidden(self, case: Case, name: str, own: F32) -> None:
        """Hidden rows after a whole stack, which have no arg-max."""
        distance = Distance.between(own, case[f"{name}.{self.flavour}"])
        if self.exact:
            self.report.judge_rows(case.name, self.flavour, name, distance, tolerance.FP32)
        else:
            limit = f"median within {tolerance.STACK_MEDIAN}"
            holds = distance.median <= tolerance.STACK_MEDIAN
            self.report.judge(case.name, self.flavour, name, str(distance), limit, holds)

    def judge_pool(self) -> None:
        """The arg-max choices of all cases together."""
        if self._choices:
            share = self._equal / self._choices
            shown, limit = f"{share:.1%} of {self._choices}", f"arg-max equal in {tolerance.ARGMAX_SHARE:.0%}"
            self.report.judge("all cases", self.flavour, "pooled", shown, limit, share >= tolerance.ARGMAX_SHARE)
