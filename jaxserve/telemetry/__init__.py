"""What the engine reports of itself: the immutable Snapshot and the Prometheus metrics. Imports no JAX."""

from jaxserve.telemetry.metrics import EngineMetrics
from jaxserve.telemetry.snapshot import Snapshot, combine

__all__ = ["EngineMetrics", "Snapshot", "combine"]
