"""Transitions of the plan on real arrays: prepared beside serving, committed between two steps."""

from jaxserve.actuator.actuator import Instance, PlanActuator
from jaxserve.actuator.copying import LayerSource, Place, Throttle
from jaxserve.actuator.pinned import HostMemory, keeper, pinned_memory

__all__ = ["HostMemory", "Instance", "LayerSource", "Place", "PlanActuator", "Throttle", "keeper", "pinned_memory"]
