"""Snapshot: the state of one engine between two steps, as policies, health checks and metrics see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Snapshot:
    """State of an engine at `time` (seconds of the engine's clock). Bytes are resident bytes of the ledger."""

    time: float = 0.0
    steps: int = 0  # finished since the start; health checks look for progress here
    num_running: int = 0  # sequences
    num_waiting: int = 0  # sequences
    waiting_tokens: int = 0  # prompt tokens of the waiting sequences that are still to be computed
    kv_pages_total: int = 0  # without the null page
    kv_pages_used: int = 0  # held by sequences; pages kept only by the prefix cache are free
    plan_version: int = 0
    layers_by_precision: Mapping[str, int] = field(default_factory=dict)  # e.g. {"bfloat16": 16}
    weight_bytes: int = 0
    kv_bytes: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages held by sequences, from 0 to 1."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0
