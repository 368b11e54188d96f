"""Faults that are injected into devices, for tests and demonstrations."""

import threading

from jaxserve.core.errors import ConfigError


class InjectedFault(Exception):
    """The error that a device raises because a fault was injected."""


class Fault:
    """A device whose stage raises once, at a step that is counted over all instances that have the device."""

    def __init__(self, device: int, step: int):
        """`device`: its index among the engine's devices. `step`: from 1 on."""
        self.device, self.step = device, step
        self._steps = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, text: str) -> "Fault":
        """Return the fault that an option's value describes, such as "1:30"."""
        device, _, step = text.partition(":")
        if not (device.isdecimal() and step.isdecimal() and int(step)):
            raise ConfigError(
                f"inject_fault is {text!r}: it must be DEVICE:STEP with a step of at least 1, such as 1:30"
            )
        return cls(int(device), int(step))

    def reached(self) -> None:
        """Count a step of the device. Raise `InjectedFault` if it is the one that fails."""
        with self._lock:
            self._steps += 1
            fails = self._steps == self.step
        if fails:
            raise InjectedFault(f"device {self.device} fails at step {self.step}, as inject_fault says")
