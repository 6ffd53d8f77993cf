"""What is recorded comes out, under both sets of names."""

import prometheus_client.parser
import pytest

from dsuf.observe.aliases import SGLANG_NAMES, VLLM_NAMES, Rate
from dsuf.observe.metrics import Load, Metrics
from dsuf.types import Usage


def read(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and label values (in the order of the labels' names)."""
    families = prometheus_client.parser.text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, tuple(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_finished_turn_is_counted_under_both_names() -> None:
    metrics = Metrics("deepseek-flash")
    usage = Usage(device_tokens=30, peer_tokens=5, computed_tokens=65, completion_tokens=7)
    metrics.finish_turn("stop", usage, 1.5)
    metrics.finish_turn("abort", Usage(), 0.5)
    samples = read(metrics)
    model = ("deepseek-flash",)
    assert samples["dsuf_prompt_tokens_total", ()] == samples["vllm:prompt_tokens_total", model] == 100
    assert samples["dsuf_generation_tokens_total", ()] == samples["vllm:generation_tokens_total", model] == 7
    assert samples["vllm:prefix_cache_queries_total", model] == 100
    assert samples["vllm:prefix_cache_hits_total", model] == 35
    assert samples["dsuf_prompt_source_tokens_total", ("peer",)] == 5
    assert samples["vllm:request_success_total", ("stop", *model)] == 1
    assert samples["vllm:e2e_request_latency_seconds_count", model] == 2
    assert samples["vllm:e2e_request_latency_seconds_sum", model] == 2.0


def test_all_names_that_dashboards_query_are_there() -> None:
    metrics = Metrics("m")
    metrics.finish_turn("stop", Usage(), 0.1)
    metrics.count_drafts(5, 1)
    names = {name for name, _ in read(metrics)}
    for alias in (*VLLM_NAMES.values(), *SGLANG_NAMES.values(), "sglang:cache_hit_rate", "sglang:gen_throughput"):
        assert names & {alias, f"{alias}_total", f"{alias}_count"}, alias
    assert not [name for name in names if name.endswith("_created")]


def test_gauges_are_read_when_asked_for() -> None:
    metrics, load = Metrics("m"), [Load()]
    metrics.watch_load(lambda: load[0])
    assert read(metrics)["dsuf_requests_running", ()] == 0
    load[0] = Load(running=3, waiting=2, cache_usage=0.5)
    samples = read(metrics)
    assert samples["vllm:num_requests_running", ("m",)] == 3
    assert samples["vllm:num_requests_waiting", ("m",)] == 2
    assert samples["vllm:kv_cache_usage_perc", ("m",)] == 0.5


def test_the_rate_of_tokens_is_that_since_it_was_read() -> None:
    now_s = 10.0
    rate = Rate(lambda: now_s)
    rate.add(30)
    assert rate.read() == 0.0, "not a second has passed"
    now_s += 2.0
    assert rate.read() == 15.0
    now_s += 0.5
    rate.add(8)
    assert rate.read() == 15.0
    now_s += 1.5
    assert rate.read() == 4.0
    now_s += 4.0
    assert rate.read() == 0.0


def test_what_other_servers_call_it() -> None:
    metrics = Metrics("m")
    metrics.watch_load(lambda: Load(running=3, waiting=2, cache_usage=0.5))
    metrics.finish_turn("stop", Usage(device_tokens=25, computed_tokens=75), 0.1)
    samples = read(metrics)
    expected = {"num_running_reqs": 3, "num_queue_reqs": 2, "token_usage": 0.5, "cache_hit_rate": 0.25}
    assert {name: samples[f"sglang:{name}", ("m",)] for name in expected} == expected


def test_token_times_are_shared_among_tokens_that_came_together() -> None:
    metrics = Metrics("m")
    metrics.observe_first_token(0.3)
    metrics.observe_tokens(4, 0.02)
    samples = read(metrics)
    assert samples["vllm:inter_token_latency_seconds_count", ("m",)] == 4
    assert samples["vllm:inter_token_latency_seconds_sum", ("m",)] == pytest.approx(0.02)
    assert samples["vllm:time_to_first_token_seconds_sum", ("m",)] == pytest.approx(0.3)


def test_http_counters() -> None:
    metrics = Metrics("m")
    metrics.count_response("/v1/messages", 429)
    metrics.count_disconnect("prefilling")
    metrics.count_conversion_error("/v1/messages")
    metrics.count_malformed_call()
    metrics.fail_turn("EngineFailed")
    samples = read(metrics)
    assert samples["dsuf_http_responses_total", ("/v1/messages", "429")] == 1
    assert samples["dsuf_client_disconnects_total", ("prefilling",)] == 1
    assert samples["dsuf_conversion_errors_total", ("/v1/messages",)] == 1
    assert samples["dsuf_malformed_calls_total", ()] == 1
    assert samples["dsuf_requests_failed_total", ("EngineFailed",)] == 1


def test_drafts_are_counted_by_position() -> None:
    metrics = Metrics("m")
    metrics.count_drafts(5, 2)
    metrics.count_drafts(5, 0)
    samples = read(metrics)
    assert samples["dsuf_draft_rounds_total", ()] == samples["vllm:spec_decode_num_drafts_total", ("m",)] == 2
    assert samples["dsuf_draft_tokens_total", ()] == samples["vllm:spec_decode_num_draft_tokens_total", ("m",)] == 10
    assert samples["vllm:spec_decode_num_accepted_tokens_total", ("m",)] == 2
    assert samples["dsuf_draft_accepted_at_position_total", ("0",)] == 1
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", ("m", "1")] == 1


def test_the_promise_on_gaps_and_how_it_is_kept() -> None:
    metrics = Metrics("m")
    metrics.promise_gap(0.5)
    for seconds in (0.1, 0.6, 0.3):
        metrics.observe_gap(seconds)
    samples = read(metrics)
    assert samples["dsuf_decode_gap_bound_seconds", ()] == 0.5
    assert samples["dsuf_decode_gap_largest_seconds", ()] == 0.6
    assert samples["dsuf_decode_gap_violations_total", ()] == 1


def test_queue_pages_audits_preemptions_and_tokens_a_step() -> None:
    metrics = Metrics("m")
    metrics.watch_load(lambda: Load(waiting_by={"first": 1, "last": 4}, pages={"used": 5, "cached": 2, "free": 9}))
    metrics.count_preemption()
    metrics.count_audit("different")
    for tokens in (1, 6, 6):
        metrics.observe_tokens(tokens, 0.1)
    samples = read(metrics)
    queue = [samples["dsuf_queue_turns", (name,)] for name in ("first", "normal", "last")]
    assert queue == [1, 0, 4]
    assert [samples["dsuf_pages", (state,)] for state in ("used", "cached", "free")] == [5, 2, 9]
    assert samples["dsuf_preemptions_total", ()] == samples["vllm:num_preemptions_total", ("m",)] == 1
    assert samples["dsuf_speculation_audits_total", ("different",)] == 1
    assert samples["dsuf_step_tokens_count", ()] == 3 and samples["dsuf_step_tokens_sum", ()] == 13
