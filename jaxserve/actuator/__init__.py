"""The actuator: carries out transitions on real arrays, prepared while steps run and committed between two steps."""

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
