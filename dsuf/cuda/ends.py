"""Where a pass begins and ends: ids to streams, streams to logits, logits to tokens."""

from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.launches import Pass


def project_logits(todo: Pass, arena: Arena, norm: Array, vocabulary: int) -> None:
    """Queue the `logits` of every row: the last collapse, normed by `norm`, through the head."""
    work = todo.work
    todo.launch(
        "collapse_norm", streams=work["streams"], pre=work["ffn.pre"], weight=norm, y=work["final"], codes=None,
        scales=None, meaning=None,
    )  # fmt: skip
    todo.launch(
        "project_bf16_dim", x=work["final"], weight=arena["head.weight"], out=work["logits"], rounded=None,
        n=vocabulary,
    )  # fmt: skip


def enter_streams(todo: Pass, arena: Arena) -> None:
    """Queue the rows' embeddings into every stream, and the weights (1, 0, …) of the first collapse."""
    work = todo.work
    todo.launch(
        "embed_rows", embedding=arena["embed.weight"], row_id=work["row_id"], streams=work["streams"],
        pre=work["ffn.pre"],
    )  # fmt: skip


def sample_rows(
    todo: Pass, vocabulary: int, rows: int, live: Array, *, first: int = 0, step: int = 1, purpose: int = 0
) -> None:
    """Queue the choice of a token for rows `first`, `first` + `step` …, and what acceptance needs of each."""
    work, turns = todo.work, todo.turns
    found = {name: work[name] for name in ("picked", "peak", "least", "last", "mass")}
    todo.launch_plain(
        "sample_rows", logits=work["logits"], row_slot=work["row_slot"], row_position=work["row_position"],
        temperature=turns["temperature"], top_p=turns["top_p"], seed=turns["seed"], **found, live=live, rows=rows,
        turns=turns["length"].shape[0], vocabulary=vocabulary, first=first, step=step, purpose=purpose,
    )  # fmt: skip
