"""Transitions of the plan on real arrays: prepared beside serving, committed between two steps."""

from jaxserve.actuator.actuator import PlanActuator, RunningInstance
from jaxserve.actuator.copying import LayerSource, Place, Throttle
from jaxserve.actuator.pinned import HostMemory, pinned_memory, pinned_store

__all__ = [
    "HostMemory",
    "LayerSource",
    "Place",
    "PlanActuator",
    "RunningInstance",
    "Throttle",
    "pinned_memory",
    "pinned_store",
]
