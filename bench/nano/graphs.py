"""Passes as CUDA graphs: one forward and backward for each bucket and mode, one for the optimiser.

Inputs, gradients, counts and loads live outside the graphs' common memory pool; all else in the pool is overwritten by
the next replay. On a machine without CUDA, or after a capture that failed, a pass runs as it is written.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from bench.nano.mode import Mode
from bench.nano.optimiser import Optimiser
from bench.nano.stages import Pass

LABELS = 6
DRAFT_ROWS = 5
# One more slot than passes under way, so that the host fills one while the device works through the others.
SLOTS = 3


class Outcome(Protocol):
    """What a model's forward gives; see `bench.nano.model.Outcome`."""

    @property
    def loss(self) -> torch.Tensor:
        """To be minimised."""
        ...

    @property
    def metrics(self) -> torch.Tensor:
        """Figures of the model's own."""
        ...

    @property
    def loads(self) -> tuple[torch.Tensor, ...]:
        """The experts' shares of the tokens, by router."""
        ...

    @property
    def right(self) -> torch.Tensor:
        """Where the arg-max is the next token."""
        ...

    @property
    def draft_right(self) -> torch.Tensor | None:
        """Where a draft row's arg-max is the token it stands for."""
        ...


class Inputs(NamedTuple):
    """The tensors of one batch: ids and labels [rows, tokens], weights likewise, anchors [count]."""

    ids: torch.Tensor
    weights: torch.Tensor
    labels: torch.Tensor
    anchors: torch.Tensor


class Counts(NamedTuple):
    """Sums since the last reading, one device tensor each; by label, by draft row, as the model's metrics."""

    seen: torch.Tensor
    right: torch.Tensor
    accepted: torch.Tensor
    metrics: torch.Tensor
    steps: torch.Tensor


class Prepared(NamedTuple):
    """How a pass was made ready: `graph` or `eager`, seconds, bytes that the device then held at its peak."""

    how: str
    compile_s: float
    capture_s: float
    peak_bytes: int


class _Captured(NamedTuple):
    run: Callable[[], object]
    inputs: Inputs
    slots: list[Inputs]
    hits: torch.Tensor
    draft_hits: torch.Tensor


class Passes:
    """Runs passes of a model whose parameters an optimiser holds."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimiser: Optimiser,
        buckets: Mapping[str, tuple[int, int]],
        anchors: int,
        metrics: int,
        fix: Callable[[], None],
    ) -> None:
        """`buckets` gives rows and tokens by name; `anchors` is their number in every batch, `metrics` that of
        the model's; `fix` follows each step.
        """
        device = self.device = optimiser.masters.device
        self.model, self.optimiser, self.buckets = model, optimiser, buckets
        self.anchors, self._fix = anchors, fix
        self.counts = Counts(
            *(torch.zeros(n, device=device) for n in (LABELS, LABELS, DRAFT_ROWS + 1, metrics, 1)),
        )
        self.norm = torch.zeros((), device=device)
        # Equal shares move no bias.
        self.loads = [torch.ones_like(bias) for bias in optimiser.biases]
        self._captured: dict[Pass, _Captured] = {}
        self._inputs: dict[str, tuple[Inputs, list[Inputs]]] = {}
        self._step: Callable[[], object] | None = None
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def is_ready(self, item: Pass) -> bool:
        """Whether `prepare` has been here."""
        return item in self._captured

    def prepare(self, item: Pass, *, as_written: bool = False) -> Prepared:
        """Compile and capture a pass; raises whatever the compiler raises. Gradients are as after a pass.

        With `as_written` nothing is compiled, whatever was before.
        """
        inputs, slots = self._bucket(item.bucket)
        hits = torch.zeros(inputs.ids.shape, dtype=torch.bool, device=self.device)
        draft_hits = torch.zeros((self.anchors, DRAFT_ROWS), dtype=torch.bool, device=self.device)

        def work() -> None:
            with torch.compiler.set_stance("force_eager") if as_written else contextlib.nullcontext():
                self._pass(inputs, item.mode, hits, draft_hits)

        run, prepared = self._capture(work, warm=2)
        self._captured[item] = _Captured(run, inputs, slots, hits, draft_hits)
        self.read()
        return prepared

    def measure_gradient(self, item: Pass) -> tuple[float, float]:
        """Norms of the gradient that the last run has left, and of its batch's with nothing compiled."""
        captured, norm = self._captured[item], float(self.optimiser.gradients.norm())
        with torch.compiler.set_stance("force_eager"):
            self._pass(captured.inputs, item.mode, captured.hits, captured.draft_hits)
        return norm, float(self.optimiser.gradients.norm())

    def prepare_step(self) -> Prepared:
        """Capture the optimiser, after two steps at rate zero."""
        self.optimiser.set_pace(0.0, draft_on=False)
        count = self.optimiser.count.clone()
        self.optimiser.gradients.zero_()
        run, prepared = self._capture(self._take_step, warm=2)
        self.optimiser.count.copy_(count)
        self._step = run
        return prepared

    def run(self, item: Pass, ids: np.ndarray, weights: np.ndarray, labels: np.ndarray, anchors: np.ndarray) -> None:
        """Fill the inputs and start one pass; returns before the device has done it."""
        captured = self._captured[item]
        slot = self._turn % SLOTS
        if self._events:
            self._events[slot].synchronize()
        for static, staged, array in zip(
            captured.inputs, captured.slots[slot], (ids, weights, labels, anchors), strict=True
        ):
            staged.copy_(torch.from_numpy(array))
            static.copy_(staged, non_blocking=True)
        captured.run()
        self._turn += 1
        if self._stream is not None:
            self._events = self._events or [torch.cuda.Event() for _ in range(SLOTS)]
            self._events[slot].record()

    def step(self) -> None:
        """One step of the optimiser from the gradients of the last pass."""
        if self._step is None:
            self._take_step()
        else:
            self._step()

    def hits(self, item: Pass) -> tuple[np.ndarray, np.ndarray]:
        """Of the last run of a pass: right arg-maxima [rows, tokens] and right draft rows [anchors, 5]; waits."""
        captured = self._captured[item]
        return captured.hits.cpu().numpy(), captured.draft_hits.cpu().numpy()

    def read(self) -> dict[str, np.ndarray]:
        """The counts since the last reading, by name; waits for the device and starts them again at zero."""
        values = {name: tensor.cpu().numpy().copy() for name, tensor in self.counts._asdict().items()}
        for tensor in self.counts:
            tensor.zero_()
        return values | {"norm": self.norm.cpu().numpy().copy()}

    def _pass(self, inputs: Inputs, mode: Mode, hits: torch.Tensor, draft_hits: torch.Tensor) -> None:
        """Forward, backward and counting; what gets captured."""
        self.optimiser.gradients.zero_()
        outcome: Outcome = self.model(inputs.ids, inputs.weights, mode, inputs.anchors)
        outcome.loss.backward()
        with torch.no_grad():
            hits.copy_(outcome.right)
            if outcome.draft_right is not None:
                draft_hits.copy_(outcome.draft_right)
            for kept, load in zip(self.loads, outcome.loads, strict=False):  # without drafts, theirs stay equal
                kept.copy_(load)
            self._count(inputs.labels, outcome, draft_hits)

    def _count(self, labels: torch.Tensor, outcome: Outcome, draft_hits: torch.Tensor) -> None:
        for label in range(LABELS):
            mine = labels == label
            self.counts.seen[label] += mine.sum()
            self.counts.right[label] += (mine & outcome.right).sum()
        if outcome.draft_right is not None:
            self.counts.accepted[:DRAFT_ROWS] += torch.cumprod(draft_hits.float(), dim=1).sum(0)
            self.counts.accepted[DRAFT_ROWS] += len(draft_hits)
        self.counts.metrics.add_(outcome.metrics)
        self.counts.steps.add_(1)

    def _take_step(self) -> None:
        self.norm.copy_(self.optimiser.step(self.loads))
        self._fix()

    def _bucket(self, name: str) -> tuple[Inputs, list[Inputs]]:
        """The static inputs of a bucket and its pinned slots; a bucket's modes share them."""
        if name not in self._inputs:
            self._inputs[name] = (self._inputs_of(name, self.device), [self._staged(name) for _ in range(SLOTS)])
        return self._inputs[name]

    def _inputs_of(self, name: str, device: torch.device) -> Inputs:
        shape = self.buckets[name]
        ids = torch.full(shape, 3, dtype=torch.int32, device=device)
        weights, labels = torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.uint8, device=device)
        return Inputs(ids, weights, labels, torch.ones(self.anchors, dtype=torch.int64, device=device))

    def _staged(self, name: str) -> Inputs:
        inputs = self._inputs_of(name, torch.device("cpu"))
        return inputs if self._stream is None else Inputs(*(tensor.pin_memory() for tensor in inputs))

    def _capture(self, work: Callable[[], None], warm: int) -> tuple[Callable[[], object], Prepared]:
        """Warm up and capture on the same side stream; without CUDA the work itself."""
        start = time.perf_counter()
        if self._stream is None:
            work()
            return work, Prepared("eager", time.perf_counter() - start, 0.0, 0)
        torch.cuda.reset_peak_memory_stats()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(warm):
                work()
        torch.cuda.synchronize()
        warmed = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize()
        done = time.perf_counter()
        return graph.replay, Prepared("graph", warmed - start, done - warmed, torch.cuda.max_memory_allocated())
