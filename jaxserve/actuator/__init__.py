"""The actuator: carries out transitions on real arrays, prepared while steps run and committed between two steps."""

from jaxserve.actuator.actuator import DeviceInstance, PlanActuator
from jaxserve.actuator.copying import LayerSource, Place, Throttle
from jaxserve.actuator.pinned import HostMemory, pinned_memory, pinned_store

__all__ = [
    "DeviceInstance",
    "HostMemory",
    "LayerSource",
    "Place",
    "PlanActuator",
    "Throttle",
    "pinned_memory",
    "pinned_store",
]
