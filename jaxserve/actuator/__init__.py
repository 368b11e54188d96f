"""The actuator: carries out transitions on real arrays, prepared while steps run and committed between two steps."""

from jaxserve.actuator.actuator import DeviceInstance, PlanActuator
from jaxserve.actuator.throttle import Throttle

__all__ = ["DeviceInstance", "PlanActuator", "Throttle"]
