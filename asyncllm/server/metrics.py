"""/metrics: the engine's heartbeat and the loop's totals, in Prometheus' words.

Loop thread. Read at each scrape, so nothing goes stale; it keeps no count of its own.
"""

import asyncio
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..llm import AsyncLLM
from ..pace import Histogram
from ..types import FinishReason
from .events import Outflows
from .websocket import Sockets


class Metrics(Collector):
    """A collector in a registry of its own: two servers in one process do not add up."""

    def __init__(self, llm: AsyncLLM, sockets: Sockets, outflows: Outflows) -> None:
        self._llm = llm
        self._sockets = sockets
        self._outflows = outflows
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def expose(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        stats, limits, pace = self._llm.stats, self._llm.limits, self._llm.pace
        kv_usage = stats.pages_used / max(1, stats.pages_total)
        for name, help_text, value in (
            ("requests_running", "Sequences that hold a slot", stats.num_running),
            ("requests_waiting", "Sequences that wait for one", stats.num_waiting),
            ("requests_live", "Requests that have not been answered to the end", self._llm.num_live),
            ("kv_pages_used", "KV pages held by sequences", stats.pages_used),
            ("kv_pages_cached", "KV pages of the prefix cache that no sequence holds", stats.pages_cached),
            ("kv_pages_total", "KV pages there are", stats.pages_total),
            ("kv_cache_usage", "Share of the KV pages that sequences hold", kv_usage),
            ("batch_occupancy", "Share of the slots that are in use", stats.num_running / limits.max_running),
            ("engine_step", "Number of the engine's last step", stats.step),
            ("engine_silent_seconds", "For how long no step has ended while somebody waits", self._llm.silent_s),
            ("tasks", "Tasks of the event loop", len(asyncio.all_tasks())),
            ("websockets_open", "Open WebSocket connections", len(self._sockets)),
            ("unsent_bytes", "Bytes that wait for clients to read", self._num_unsent_bytes()),
            ("flush_gathering", "1 while text is gathered, as the loop lags; 0 at every step", pace.gathering),
        ):
            yield GaugeMetricFamily(f"asyncllm_{name}", help_text, value)

    def _counters(self) -> Iterator[Metric]:
        totals = self._llm.totals
        finished = CounterMetricFamily("asyncllm_requests_finished", "Sequences that ended", labels=["reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], totals.finished[reason.value])
        yield finished
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens of ended sequences", totals.num_prompt_tokens),
            ("cached_tokens", "Of these, found in the prefix cache", totals.num_cached_tokens),
            ("output_tokens", "Generated tokens of ended sequences", totals.num_output_tokens),
            ("preemptions", "Sequences that had to give their pages back", self._llm.stats.num_preemptions),
            ("flushes", "Times a reader was given its text", self._llm.pace.num_flushes),
            ("flush_mode_changes", "Turns between flushing at every step and gathering", self._llm.pace.num_turns),
        ):
            yield CounterMetricFamily(f"asyncllm_{name}", help_text, value)

    def _histograms(self) -> Iterator[Metric]:
        totals, pace = self._llm.totals, self._llm.pace
        for name, help_text, histogram in (
            ("time_to_first_token", "From arrival to the first token", totals.first_token),
            ("inter_token_latency", "Between two tokens of a sequence, as they reach the loop", totals.between_tokens),
            ("request_queue_time", "From arrival to a slot", totals.queue),
            ("request_prefill_time", "From a slot to the first token", totals.prefill),
            ("request_decode_time", "From the first token to the last", totals.decode),
            ("e2e_request_latency", "From arrival to the end", totals.whole),
            ("loop_lag", "How late a timer of the event loop is, while steps come", pace.lag),
            ("hand_off", "From the engine's put to the event loop", pace.hand_off),
        ):
            yield _family(f"asyncllm_{name}_seconds", help_text, histogram)

    def _num_unsent_bytes(self) -> int:
        return self._llm.num_unread_bytes + self._sockets.num_unsent_bytes + self._outflows.num_unsent_bytes


def _family(name: str, help_text: str, histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=histogram.sum)
