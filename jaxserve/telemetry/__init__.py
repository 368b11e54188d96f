"""Telemetry: immutable snapshots of an engine, their smoothing, and Prometheus metrics. Imports no JAX."""

from jaxserve.telemetry.metrics import TIME_BOUNDS, EngineMetrics
from jaxserve.telemetry.snapshot import Recent, Snapshot, combine
from jaxserve.telemetry.windows import Smoother

__all__ = ["TIME_BOUNDS", "EngineMetrics", "Recent", "Smoother", "Snapshot", "combine"]
