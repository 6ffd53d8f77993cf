"""The table that `dsuf weights plan` prints: how many tensors and bytes a configuration asks for."""

from collections.abc import Iterable, Mapping

from dsuf.checkpoint.inventory import PARTS, Part, Tally

_HEADINGS = ("part", "dtype", "tensors", "bytes")


def format_plan(table: Mapping[tuple[Part, str], Tally]) -> str:
    """`table` as text: a row for each part and dtype, then one for each dtype, then the total."""
    rows = [_row(part, dtype, [tally]) for (part, dtype), tally in sorted(table.items(), key=_order)]
    dtypes = sorted({dtype for _, dtype in table})
    sums = [_row("all", dtype, [tally for (_, at), tally in table.items() if at == dtype]) for dtype in dtypes]
    return _align([_HEADINGS, *rows, None, *sums, None, _row("total", "", table.values())])


def _order(item: tuple[tuple[Part, str], Tally]) -> tuple[int, str]:
    (part, dtype), _ = item
    return PARTS.index(part), dtype


def _row(part: str, dtype: str, tallies: Iterable[Tally]) -> tuple[str, ...]:
    counted = list(tallies)
    return part, dtype, f"{sum(t.tensors for t in counted):,}", f"{sum(t.bytes for t in counted):,}"


def _align(rows: list[tuple[str, ...] | None]) -> str:
    """`rows` in columns, the last two flush right; None is a rule."""
    widths = [max(len(row[column]) for row in rows if row) for column in range(4)]
    rule = "  ".join("-" * width for width in widths)
    lines = [
        rule if row is None else "  ".join(
            cell.rjust(width) if column > 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]  # fmt: skip
    return "\n".join(lines)
