"""Transitions of the plan on real arrays: prepared beside serving, committed between two steps."""

from jaxserve.actuator.actuator import PlanActuator, RunningInstance
from jaxserve.actuator.copying import LayerSource, Place, Throttle
from jaxserve.actuator.pinned import HostMemory, keeper, pinned_memory

__all__ = [
    "HostMemory",
    "LayerSource",
    "Place",
    "PlanActuator",
    "RunningInstance",
    "Throttle",
    "keeper",
    "pinned_memory",
]
