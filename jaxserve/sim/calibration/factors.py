"""The few numbers of a hardware file that a measured run of a server can tell, and their change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sim.hardware import Hardware, Overheads
from jaxserve.sim.request_columns import Floats

START = Overheads(step=1e-4, sequence=1e-5, request=1e-3, stream=2e-5)  # s, where the file has none
HOST_WORK = ("loop", "program", "array", "answer")
FITTED = ("step", "sequence", "request", "stream")  # overheads (s)


@dataclass(frozen=True)
class Factors:
    """Factors on a hardware's rates, and its overheads (s)."""

    bandwidth: float = 1.0
    compute: float = 1.0
    host: float = 1.0  # on the host's work on steps, where the file has any
    step: float = START.step
    sequence: float = START.sequence
    request: float = START.request
    stream: float = START.stream

    @classmethod
    def of(cls, hardware: Hardware) -> "Factors":
        """Return the factors that leave a hardware as it is, except that missing overheads get a first guess."""
        known = {name: getattr(hardware.overheads, name) or getattr(START, name) for name in FITTED}
        return cls(**known)

    def applied(self, hardware: Hardware) -> Hardware:
        """Return the hardware with these rates and overheads."""
        overheads = {name: getattr(self, name) for name in FITTED}
        overheads |= {name: getattr(hardware.overheads, name) * self.host for name in HOST_WORK}
        return replace(
            hardware,
            bandwidth=hardware.bandwidth * self.bandwidth,
            rates={name: rate * self.compute for name, rate in hardware.rates.items()},
            overheads=replace(hardware.overheads, **overheads),
        )

    def lines(self, before: "Factors", *, host: bool) -> list[tuple[str, str, str]]:
        """Return (name, before, after) of each number for a table."""
        rows = [("memory bandwidth", "1.00x", f"{self.bandwidth:.2f}x"), ("compute", "1.00x", f"{self.compute:.2f}x")]
        if host:
            rows.append(("host work of a step", "1.00x", f"{self.host:.2f}x"))
        names = {"step": "a step", "sequence": "a decoding sequence", "request": "a request", "stream": "a stream"}
        for name, text in names.items():
            old, new = (f"{1e6 * getattr(each, name):.0f} us" for each in (before, self))
            rows.append((f"overhead of {text}", old, new))
        return rows


def names_of(hardware: Hardware) -> tuple[str, ...]:
    """Return the names of the factors that matter on a hardware."""
    host = ("host",) if any(getattr(hardware.overheads, name) for name in HOST_WORK) else ()
    return ("bandwidth", "compute", *host, *FITTED)


def to_logs(factors: Factors, names: Sequence[str]) -> Floats:
    """Return the logarithms of factors, in which they are fitted so that they stay above 0."""
    return np.log([getattr(factors, name) for name in names])


def from_logs(logs: Floats, names: Sequence[str]) -> Factors:
    """Return the factors with these logarithms."""
    return Factors(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
