"""Metrics of KV transfers: those of vLLM 0.32's NixlConnector, and podsim's own for errors vLLM cannot see.

The KV transfer counts; the API adds these after the pod's other metrics if the pod has a connector.
"""

from collections.abc import Mapping

from podsim.wire.metrics_text import Histogram

_TIMES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2 ** (10 + step)) for step in range(1, 25, 2))
_DESCRIPTORS = tuple(
    float(bound) for bound in (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
)


class NixlMetrics:
    """One pod's transfers since its start; both ends use the same metric names, and each counts its own."""

    def __init__(self, *, labels: str) -> None:
        self._labels = labels
        self.failed_transfers = 0  # including handshakes and notifications
        self.failed_notifications = 0
        self.expired_leases = 0
        self.late_notifications = 0
        self.stale_reads = 0
        self.engine_deaths = 0
        self.transfer_time = Histogram(
            "vllm:nixl_xfer_time_seconds",
            "Histogram of transfer duration for NIXL KV Cache transfers.",
            labels=labels,
            buckets=_TIMES[1:],
        )
        self.post_time = Histogram(
            "vllm:nixl_post_time_seconds",
            "Histogram of transfer post time for NIXL KV Cache transfers.",
            labels=labels,
            buckets=_TIMES,
        )
        self.transferred_bytes = Histogram(
            "vllm:nixl_bytes_transferred",
            "Histogram of bytes transferred per NIXL KV Cache transfers.",
            labels=labels,
            buckets=_BYTES,
        )
        self.descriptors = Histogram(
            "vllm:nixl_num_descriptors",
            "Histogram of number of descriptors per NIXL  KV Cache transfers.",
            labels=labels,
            buckets=_DESCRIPTORS,
        )

    def transferred(self, *, seconds: float, size: int, blocks: int) -> None:
        """Count a successful transfer of `size` bytes, with one descriptor per block, all posted at once."""
        self.transfer_time.observe(seconds)
        self.post_time.observe(0.0)
        self.transferred_bytes.observe(size)
        self.descriptors.observe(blocks)

    def render(self, loads_by_stage: Mapping[str, int] | None) -> bytes:
        """Return the lines; `loads_by_stage` counts waiting requests and is None if the pod loads nothing."""
        histograms = (self.transfer_time, self.post_time, self.transferred_bytes, self.descriptors)
        parts = [histogram.render() for histogram in histograms]
        parts += [
            f"# HELP {name} {text}\n# TYPE {name} counter\n{name}{{{self._labels}}} {count}.0\n"
            for name, text, count in (
                (
                    "vllm:nixl_num_failed_transfers_total",
                    "Number of failed NIXL KV Cache transfers, including handshake and notification failures. "
                    "NOTE: KV expiry is tracked separately in vllm:nixl_num_kv_expired_reqs.",
                    self.failed_transfers,
                ),
                (
                    "vllm:nixl_num_failed_notifications_total",
                    "Number of failed NIXL KV Cache notifications. Retained for compatibility; these failures are "
                    "also included in vllm:nixl_num_failed_transfers.",
                    self.failed_notifications,
                ),
                (
                    "vllm:nixl_num_kv_expired_reqs_total",
                    "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance.",
                    self.expired_leases,
                ),
                (
                    "vllm:nixl_num_notifications_after_expiry_total",
                    "Number of completion notifications for requests that were no longer tracked, usually because "
                    "their KV lease expired. The KV blocks may have been reused before the transfer finished. "
                    "Counted per notification (one per remote rank), not per request.",
                    self.late_notifications,
                ),
                (
                    "podsim_stale_kv_reads_total",
                    "Prompts loaded from blocks that were free again, or never held this prompt: answers that a real "
                    "pod would have given wrongly, without a word.",
                    self.stale_reads,
                ),
                (
                    "podsim_engine_deaths_total",
                    "Requests on whose kv_transfer_params a real engine dies; this one lives on.",
                    self.engine_deaths,
                ),
            )
        ]
        if loads_by_stage is not None:
            name = "vllm:num_requests_kv_fetch_by_stage"
            parts.append(
                f"# HELP {name} Number of waiting requests by async KV load stage. Stage labels: 'waiting_to_start' = "
                "needs an async KV load that has not started; 'in_progress' = load started and not yet reported "
                "finished; 'completed_waiting' = load finished, request not running yet.\n"
                f"# TYPE {name} gauge\n"
            )
            parts += [f'{name}{{{self._labels},stage="{stage}"}} {n}.0\n' for stage, n in loads_by_stage.items()]
        return "".join(parts).encode()
