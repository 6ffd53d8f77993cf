"""What is taken from a public load generator's report."""

from typing import Any

from bench.public import read_report


def make_benchmark(streams: int, factor: float) -> dict[str, Any]:
    """One benchmark of a report, with the figures that are read and some that are not."""

    def figure(value: float) -> dict[str, Any]:
        percentiles = {name: value * share for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p10", 0.1))}
        return {"successful": {"mean": value, "total_sum": value * 10, "percentiles": percentiles}, "errored": {}}

    metrics = {
        "request_totals": {"successful": 9, "errored": 2, "incomplete": 0, "total": 11},
        "time_to_first_token_ms": figure(100 * factor),
        "inter_token_latency_ms": figure(10 * factor),
        "output_tokens_per_second": figure(50 / factor),
        "prompt_token_count": figure(30),
        "output_token_count": figure(20),
        "text": {"words": {}},
    }
    return {"config": {"strategy": {"streams": streams, "type_": "concurrent"}}, "metrics": metrics}


def test_a_line_for_each_number_of_streams() -> None:
    first, second = read_report({"benchmarks": [make_benchmark(1, 1), make_benchmark(4, 2)]}, "guidellm 0")
    assert (first["streams"], second["streams"]) == (1, 4)
    assert (second["requests"], second["whole"], second["errors"]) == (11, 9, 2)
    assert [second[f"first_token_ms_{name}"] for name in ("p50", "p90", "p99")] == [100, 180, 198]
    assert second["gap_ms_p50"] == 10 and first["gap_ms_p50"] == 5
    assert second["tokens_per_s"] == 25 and second["prompt_tokens"] == 300 and second["completion_tokens"] == 200
    assert list(first) == list(second)
