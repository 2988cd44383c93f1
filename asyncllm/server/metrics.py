"""/metrics: the engine's heartbeat and the loop's totals, in Prometheus' words.

Loop thread. Read at each scrape, so nothing goes stale; it keeps no count of its own.
"""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..llm import AsyncLLM
from ..types import FinishReason
from .websocket import Sockets


class Metrics(Collector):
    """A collector in a registry of its own: two servers in one process do not add up."""

    def __init__(self, llm: AsyncLLM, sockets: Sockets) -> None:
        self._llm = llm
        self._sockets = sockets
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def expose(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        stats = self._llm.stats
        for name, help_text, value in (
            ("requests_running", "Sequences that hold a slot", stats.num_running),
            ("requests_waiting", "Sequences that wait for one", stats.num_waiting),
            ("requests_live", "Requests that have not been answered to the end", self._llm.num_live),
            ("kv_pages_used", "KV pages held by sequences", stats.pages_used),
            ("kv_pages_cached", "KV pages of the prefix cache that no sequence holds", stats.pages_cached),
            ("kv_pages_total", "KV pages there are", stats.pages_total),
            ("engine_step", "Number of the engine's last step", stats.step),
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
        ):
            yield CounterMetricFamily(f"asyncllm_{name}", help_text, value)
