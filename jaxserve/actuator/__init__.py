"""Transitions of the plan on real arrays: prepared beside serving, committed between two steps."""

from jaxserve.actuator.actuator import Instance, PlanActuator
from jaxserve.actuator.copying import LayerSource, Throttle

__all__ = ["Instance", "LayerSource", "PlanActuator", "Throttle"]
