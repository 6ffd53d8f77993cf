"""Batches made ahead of their use, in processes of their own."""

import multiprocessing
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.nano.data.mix import Batch, Bucket, make_batch
from bench.nano.data.package import Package

TIMEOUT_S = 120.0  # for one batch; the slowest takes a quarter of a second
AHEAD_EACH = 2  # batches a worker has waiting, of all buckets together

_package: list[Package] = []  # in a worker: what it makes batches of


class Feeder:
    """Batches of each bucket in the order of their numbers, whatever the number of workers.

    With no workers they are made in the calling thread. `start` says for each bucket how many were taken before.
    """

    def __init__(
        self, path: Path, seed: int, workers: int, *, toy: bool = False, start: Mapping[Bucket, int] | None = None
    ) -> None:
        self._seed, self._toy = seed, toy
        self._taken: dict[Bucket, int] = dict(start or {})
        self._waiting: dict[Bucket, deque[Future[Batch]]] = {}
        self._depths: dict[Bucket, int] = {}
        self._workers = workers
        self._pool = _open_pool(path, workers) if workers else None
        self._own = None if workers else Package.load(path)

    def want(self, shares: Mapping[Bucket, float]) -> None:
        """Say which buckets come next, and in which shares: the workers run ahead for these."""
        total = sum(shares.values())
        self._depths = {
            bucket: 1 + round(AHEAD_EACH * self._workers * share / total) for bucket, share in shares.items()
        }
        for bucket in self._depths:
            self._run_ahead(bucket)

    def take(self, bucket: Bucket) -> Batch:
        """The next batch of `bucket`; raises `TimeoutError` if a worker stands still."""
        self._run_ahead(bucket)
        waiting = self._waiting.get(bucket)
        if waiting:
            batch = waiting.popleft().result(timeout=TIMEOUT_S)
        else:
            assert self._own is not None
            batch = make_batch(self._own, self._seed, bucket, self._taken.get(bucket, 0), toy=self._toy)
        self._taken[bucket] = self._taken.get(bucket, 0) + 1
        self._run_ahead(bucket)
        return batch

    def state(self) -> dict[Bucket, int]:
        """How many batches of each bucket were taken: the `start` of a feeder that goes on from here."""
        return dict(self._taken)

    def close(self) -> None:
        """End the workers; what they were making is thrown away."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_ahead(self, bucket: Bucket) -> None:
        """Have as many batches of `bucket` in the making as its share asks for, at least one."""
        if self._pool is None:
            return
        waiting = self._waiting.setdefault(bucket, deque())
        while len(waiting) < self._depths.get(bucket, 1):
            number = self._taken.get(bucket, 0) + len(waiting)
            waiting.append(self._pool.submit(_make, self._seed, bucket, number, self._toy))


def _open_pool(path: Path, workers: int) -> ProcessPoolExecutor:
    """Fresh processes: the parent may hold a GPU and threads, which a fork would copy."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_load, initargs=(path,))


def _load(path: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _package.append(Package.load(path))


def _make(seed: int, bucket: Bucket, number: int, toy: bool) -> Batch:
    return make_batch(_package[0], seed, bucket, number, toy=toy)
