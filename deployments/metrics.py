"""Prometheus text: all workers' counters, the same from any gateway, and our own histograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

WORKER_LABELS = ("worker", "model", "pool")
WORKER_GAUGES = (  # key in stats(), metric name after polypath_worker_, help
    ("running", "running", "Requests in the running batch"),
    ("waiting", "waiting", "Requests in the worker's queue"),
    ("kv_pages_total", "kv_pages", "Pages of the KV pool"),
    ("kv_pages_used", "kv_pages_used", "Pages that hold a request's or a shared prefix's tokens"),
    ("heartbeat_age_s", "heartbeat_age_seconds", "Since the step loop last gave a sign of life"),
    ("queue_time_s", "queue_time_seconds", "Estimated wait of a new request"),
)
WORKER_COUNTERS = (
    ("prompt_tokens_total", "prompt_tokens", "Prompt tokens, computed or from the prefix cache"),
    ("generation_tokens_total", "generation_tokens", "Tokens generated"),
    ("prefix_cached_tokens_total", "prefix_cached_tokens", "Prompt tokens from the prefix cache"),
    ("preemptions_total", "preemptions", "Requests sent back to the queue because pages ran out"),
    ("step_seconds_total", "step_seconds", "Seconds spent in engine steps"),
    ("step_failures_total", "step_failures", "Engine steps that failed"),
)


class GatewayMetrics:
    """What this gateway measured itself. Durations are seconds of the monotonic clock."""

    def __init__(self, gateway_id: str) -> None:
        self.registry = CollectorRegistry()
        self._gateway = gateway_id
        self._queue = self._histogram("queue", "From arrival to the hand-over to a worker")
        self._first_token = self._histogram("first_token", "From arrival to the first token")
        self._inter_token = self._histogram(
            "inter_token", "Between two steps' tokens of one answer"
        )
        self._whole = self._histogram("request", "From arrival to the end of the answer")
        self._responses = Counter(
            "polypath_gateway_responses",
            "HTTP responses by route and status",
            ("gateway", "route", "status"),
            registry=self.registry,
        )

        self._waiting = Gauge(
            "polypath_gateway_waiting",
            "Answers that wait for a worker",
            ("gateway", "model"),
            registry=self.registry,
        )
        self._queue_time = Gauge(
            "polypath_gateway_queue_time_seconds",
            "How long a new answer is likely to wait for a worker",
            ("gateway", "model"),
            registry=self.registry,
        )
        self._routes = Counter(
            "polypath_gateway_routes",
            "Answers handed to a worker, by the rule that chose it",
            ("gateway", "model", "reason"),
            registry=self.registry,
        )
        self._lost = Counter(
            "polypath_gateway_lost_attempts",
            "Answers that a worker did not end: refused, failed or moved",
            ("gateway", "model", "kind"),
            registry=self.registry,
        )
        self._refused = Counter(
            "polypath_gateway_refused_answers",
            "Answers that found no place: queue_full, no_capable_worker, no_worker",
            ("gateway", "model", "kind"),
            registry=self.registry,
        )

        self._late = Counter(
            "polypath_gateway_late_seconds",
            "Seconds in which no answer went on: the event loop was held up, or had no CPU",
            ("gateway", "kind"),
            registry=self.registry,
        )

        self._wanted = Gauge(
            "polypath_scaling_wanted_workers",
            "Workers that the scaling policy wants, by Serve's name of the pool",
            ("deployment",),
            registry=self.registry,
        )
        self._scaling_errors = Gauge(
            "polypath_scaling_errors",
            "How often the scaling policy failed and left every pool as it was",
            registry=self.registry,
        )

        self._key_requests = Counter(
            "polypath_gateway_key_requests",
            "Requests by the name of their API key: admitted, or the limit that refused them",
            ("gateway", "key", "outcome"),
            registry=self.registry,
        )
        self._key_tokens = Counter(
            "polypath_gateway_key_tokens",
            "Tokens that requests of an API key used: prompt and generated",
            ("gateway", "key", "kind"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"polypath_gateway_{name}_seconds",
            text,
            ("gateway", "model"),
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def observe_queue(self, model: str, seconds: float) -> None:
        """A request was handed to a worker."""
        self._queue.labels(self._gateway, model).observe(seconds)

    def observe_first_token(self, model: str, seconds: float) -> None:
        """An answer's first tokens came."""
        self._first_token.labels(self._gateway, model).observe(seconds)

    def observe_inter_token(self, model: str, seconds: float) -> None:
        """An answer's next tokens came."""
        self._inter_token.labels(self._gateway, model).observe(seconds)

    def observe_request(self, model: str, seconds: float) -> None:
        """A request ended, well or not."""
        self._whole.labels(self._gateway, model).observe(seconds)

    def count_route(self, model: str, reason: str) -> None:
        """An answer was handed to a worker."""
        self._routes.labels(self._gateway, model, reason).inc()

    def count_lost(self, model: str, kind: str) -> None:
        """A worker refused, failed or handed over an answer that it had been given."""
        self._lost.labels(self._gateway, model, kind).inc()

    def count_refused(self, model: str, kind: str) -> None:
        """An answer found no worker or no place in the queue."""
        self._refused.labels(self._gateway, model, kind).inc()

    def count_late(self, kind: str, seconds: float) -> None:
        """For so long no answer of this gateway went on: it was `blocked` or `starved`."""
        self._late.labels(self._gateway, kind).inc(seconds)

    def count_key(self, key: str, outcome: str) -> None:
        """A request came with the key of this name."""
        self._key_requests.labels(self._gateway, key, outcome).inc()

    def count_key_tokens(self, key: str, num_prompt: int, num_generated: int) -> None:
        """A request with the key of this name is over."""
        self._key_tokens.labels(self._gateway, key, "prompt").inc(num_prompt)
        self._key_tokens.labels(self._gateway, key, "generated").inc(num_generated)

    def count_response(self, route: str, status: int) -> None:
        """An HTTP response began."""
        self._responses.labels(self._gateway, route, str(status)).inc()

    def show_queue(self, model: str, num_waiting: int, queue_time_s: float) -> None:
        """How many answers wait here for a worker, and how long a new one would."""
        self._waiting.labels(self._gateway, model).set(num_waiting)
        self._queue_time.labels(self._gateway, model).set(queue_time_s)

    def show_scaling(self, journal: Mapping[str, Any]) -> None:  # JSON
        """What the scaling policy wants, and how often it failed, as its journal says."""
        self._scaling_errors.set(journal.get("errors", 0))
        self._wanted.clear()
        for scaling in journal.get("models", {}).values():
            for deployment, count in scaling["targets"].items():
                self._wanted.labels(deployment).set(count)

    def render(self, workers: Iterable[WorkerStats]) -> bytes:
        """The text of /metrics: the workers' part first."""
        registry = CollectorRegistry()
        registry.register(_WorkerCollector(list(workers)))
        return generate_latest(registry) + generate_latest(self.registry)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker's stats for rendering; `stats` is None when it did not answer."""

    worker: str
    model: str
    pool: str
    device: str
    path: str
    stats: Mapping[str, Any] | None  # JSON


class _WorkerCollector:
    def __init__(self, workers: list[WorkerStats]) -> None:
        self._workers = workers
        self._answered = [
            ((item.worker, item.model, item.pool), item.stats)
            for item in workers
            if item.stats is not None
        ]

    def collect(self) -> Iterator[Metric]:
        yield self._up()
        labels = WORKER_LABELS
        for key, name, text in WORKER_GAUGES:
            gauge = GaugeMetricFamily(f"polypath_worker_{name}", text, labels=labels)
            yield self._filled(gauge, key)
        for key, name, text in WORKER_COUNTERS:
            counter = CounterMetricFamily(f"polypath_worker_{name}", text, labels=labels)
            yield self._filled(counter, key)
        yield self._requests()
        yield self._steps()

    def _up(self) -> Metric:
        labels = (*WORKER_LABELS, "device", "path")
        metric = GaugeMetricFamily("polypath_worker_up", "1 if the worker answered", labels=labels)
        for item in self._workers:
            names = (item.worker, item.model, item.pool, item.device, item.path)
            metric.add_metric(names, 0.0 if item.stats is None else 1.0)
        return metric

    def _filled(self, metric: GaugeMetricFamily | CounterMetricFamily, key: str) -> Metric:
        for labels, stats in self._answered:
            if key in stats:
                metric.add_metric(labels, float(stats[key]))
        return metric

    def _requests(self) -> Metric:
        metric = CounterMetricFamily(
            "polypath_worker_requests",
            "Requests that ended, by reason",
            labels=(*WORKER_LABELS, "finish_reason"),
        )
        for labels, stats in self._answered:
            for reason, count in stats.get("requests_total", {}).items():
                metric.add_metric((*labels, str(reason)), float(count))
        return metric

    def _steps(self) -> Metric:
        metric = CounterMetricFamily(
            "polypath_worker_steps",
            "Forward passes by mode, runner and reason",
            labels=(*WORKER_LABELS, "mode", "runner", "reason"),
        )
        for labels, stats in self._answered:
            for step in stats.get("steps", ()):
                names = (*labels, step["mode"], step["runner"], step["reason"])
                metric.add_metric(names, float(step["count"]))
        return metric
