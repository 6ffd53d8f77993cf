"""What `metrics` has under the names that dashboards for vLLM and SGLang query, with their label `model_name`."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

VLLM_NAMES = {
    "dsuf_requests_running": "vllm:num_requests_running",
    "dsuf_requests_waiting": "vllm:num_requests_waiting",
    "dsuf_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "dsuf_prompt_tokens": "vllm:prompt_tokens",
    "dsuf_generation_tokens": "vllm:generation_tokens",
    "dsuf_prefix_cache_queries": "vllm:prefix_cache_queries",
    "dsuf_prefix_cache_hits": "vllm:prefix_cache_hits",
    "dsuf_requests_finished": "vllm:request_success",
    "dsuf_preemptions": "vllm:num_preemptions",
    "dsuf_draft_rounds": "vllm:spec_decode_num_drafts",
    "dsuf_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "dsuf_draft_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "dsuf_draft_accepted_at_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "dsuf_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "dsuf_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "dsuf_request_seconds": "vllm:e2e_request_latency_seconds",
    "dsuf_queue_seconds": "vllm:request_queue_time_seconds",
    "dsuf_request_prompt_tokens": "vllm:request_prompt_tokens",
    "dsuf_request_generation_tokens": "vllm:request_generation_tokens",
}

SGLANG_NAMES = {
    "dsuf_requests_running": "sglang:num_running_reqs",
    "dsuf_requests_waiting": "sglang:num_queue_reqs",
    "dsuf_cache_usage_ratio": "sglang:token_usage",
}

_SPAN_S = 1.0


class Rate:
    """How many there were a second, between the last two readings that are at least a second apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._rate, self._read_s = 0, 0.0, clock()

    def add(self, count: int) -> None:
        """So many more."""
        self._count += count

    def read(self) -> float:
        """The rate; two who read in turns each see the time since the other."""
        now_s = self._clock()
        if now_s - self._read_s >= _SPAN_S:
            self._rate = self._count / (now_s - self._read_s)
            self._count, self._read_s = 0, now_s
        return self._rate


class VllmNames(Collector):
    """The metrics of `source` that have a name in `VLLM_NAMES`, under that name."""

    def __init__(self, source: CollectorRegistry, model_name: str) -> None:
        self._source = source
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Renamed copies of what the source holds now."""
        for family in self._source.collect():
            if name := VLLM_NAMES.get(family.name):
                renamed = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    renamed.add_sample(name + suffix, {"model_name": self._model_name, **sample.labels}, sample.value)
                yield renamed


class SglangNames(Collector):
    """The few gauges that SGLang's dashboards are made of, out of `source` and of the rate of generated tokens."""

    def __init__(self, source: CollectorRegistry, model_name: str, tokens: Rate) -> None:
        self._source, self._model_name, self._tokens = source, model_name, tokens

    def collect(self) -> Iterator[Metric]:
        """The gauges as of now; the part of prompt tokens that was not computed is over the whole life of the node."""
        found = {family.name: family.samples[0].value for family in self._source.collect() if family.samples}
        asked = found.get("dsuf_prefix_cache_queries", 0.0)
        hits = found.get("dsuf_prefix_cache_hits", 0.0) / asked if asked else 0.0
        yield self._make("sglang:cache_hit_rate", "Part of the prompt tokens that was not computed", hits)
        yield self._make("sglang:gen_throughput", "Generated tokens a second", self._tokens.read())
        for name, alias in SGLANG_NAMES.items():
            yield self._make(alias, name, found.get(name, 0.0))

    def _make(self, name: str, text: str, value: float) -> Metric:
        """One gauge."""
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge
