"""Telemetry: immutable snapshots of an engine, their smoothing, and Prometheus metrics. Imports no JAX."""

from jaxserve.telemetry.control_state import ControlState, KVCapacity, Quality
from jaxserve.telemetry.definitions import TIME_BOUNDS
from jaxserve.telemetry.exposition import HttpFigures
from jaxserve.telemetry.metrics import EngineMetrics, InstanceMetrics
from jaxserve.telemetry.snapshot import Recent, Snapshot, WaitingRoom, combine
from jaxserve.telemetry.windows import Smoother

__all__ = [
    "TIME_BOUNDS",
    "ControlState",
    "EngineMetrics",
    "HttpFigures",
    "InstanceMetrics",
    "KVCapacity",
    "Quality",
    "Recent",
    "Smoother",
    "Snapshot",
    "WaitingRoom",
    "combine",
]
