"""Traffic: how many bytes of parameters were copied, and over which links."""

import threading
from collections import Counter
from dataclasses import dataclass, field

import jax


@dataclass(frozen=True)
class Bytes:
    """Bytes that were written to devices, by where they came from."""

    local: int = 0  # from the same device
    host: int = 0
    links: Counter[tuple[jax.Device, jax.Device]] = field(default_factory=Counter)  # (from, to)


class Traffic:
    """A count of the bytes that were copied. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = self._host = 0
        self._links: Counter[tuple[jax.Device, jax.Device]] = Counter()

    def count(self, size: int, target: jax.Device, source: jax.Device | None) -> None:
        """Count bytes that a device got from a source: itself, another device, or the host (None)."""
        with self._lock:
            if source is None:
                self._host += size
            elif source == target:
                self._local += size
            else:
                self._links[source, target] += size

    @property
    def bytes(self) -> Bytes:
        """The bytes since the start or the last `reset`."""
        with self._lock:
            return Bytes(self._local, self._host, self._links.copy())

    def reset(self) -> Bytes:
        """Return the bytes, and count from zero again."""
        with self._lock:
            counted = Bytes(self._local, self._host, self._links)
            self._local = self._host = 0
            self._links = Counter()
            return counted
