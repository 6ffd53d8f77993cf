"""Log-probabilities that steps leave for the host, beside their records: of what was chosen, and of the likeliest.

They are those of the logits before mask and temperature. A step's lists lie in a ring of pinned memory, row by row of
the step, and are there when its record is.
"""

from dsuf.cuda.arena import Arena, Array, Region
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.launches import Pass
from dsuf.cuda.results import RESULT_STEPS
from dsuf.types import Logprob

MOST_LIKELIEST = 20


def plan_ratings(pipeline: str, batch: int, block: int) -> list[Region]:
    """The regions of a pipeline's log-probabilities, for steps of up to `batch` turns and `block` drafts each."""
    rows = batch * (block + 1)
    lists = (RESULT_STEPS, rows, MOST_LIKELIEST)
    return [
        Region(f"{pipeline}.likeliest", "i32", lists, "results", pinned=True),
        Region(f"{pipeline}.likeliest_logprobs", "f32", lists, "results", pinned=True),
        Region(f"{pipeline}.chosen_logprobs", "f32", (RESULT_STEPS, rows), "results", pinned=True),
        Region(f"{pipeline}.total", "f64", (rows,), "workspaces"),
    ]


class Ratings:
    """The lists of one pipeline: queued, and read."""

    def __init__(self, arena: Arena, pipeline: str) -> None:
        names = ("likeliest", "likeliest_logprobs", "chosen_logprobs", "total", "step")
        self._arrays = {name: arena[f"{pipeline}.{name}"] for name in names}
        self._ids, self._logprobs, self._chosen = (arena.host(f"{pipeline}.{name}") for name in names[:3])

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def rank(self, todo: Pass, rows: int) -> None:
        """Queue the likeliest tokens of the rows of a pass, whose logits nothing is ruled out of yet."""
        own = {name: self[name] for name in ("total", "likeliest", "likeliest_logprobs", "step")}
        todo.launch_plain(
            "rank_logits", logits=todo.work["logits"], row_slot=todo.work["row_slot"], live=todo.work["live"],
            **own, **self._sizes(todo), rows=rows,
        )  # fmt: skip

    def rate(self, todo: Pass, **values: DeviceArray | int | None) -> None:
        """Queue the rating of what was chosen: `turn`, `first`, `kept`, `next`, `live` and `batch` as the launch names
        them."""
        own = {name: self[name] for name in ("total", "chosen_logprobs", "step")}
        todo.launch_plain(
            "rate_tokens", logits=todo.work["logits"], row_id=todo.work["row_id"], **own, **self._sizes(todo), **values
        )  # fmt: skip

    def read(self, step: int, row: int, count: int, top: int | None) -> tuple[Logprob, ...]:
        """Of `count` tokens from `row` on of `step`, whose record is there; nothing where `top` is None."""
        if top is None:
            return ()
        at, rows = step % RESULT_STEPS, range(row, row + count)
        ids, logprobs = (lists[at, row : row + count, :top].tolist() for lists in (self._ids, self._logprobs))
        return tuple(
            (float(self._chosen[at, each]), tuple(zip(ids[i], logprobs[i], strict=True))) for i, each in enumerate(rows)
        )

    def _sizes(self, todo: Pass) -> dict[str, Array | int]:
        logprobs = todo.turns["logprobs"]
        return {
            "logprobs": logprobs, "turns": logprobs.shape[0], "vocabulary": todo.work["logits"].shape[-1],
            "result_steps": RESULT_STEPS, "most_rows": self["chosen_logprobs"].shape[1],
        }  # fmt: skip
