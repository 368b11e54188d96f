"""The source of layers' variants in host memory, and the throttle for copying them while steps run."""

import threading
import time
from collections.abc import Callable, Mapping

import jax

from jaxserve.checkpoint import Checkpoint
from jaxserve.core.config import ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.executor.blocks import Parameter

# A function that moves a variant into pinned memory: (block, parameters, precision) -> parameters there.
Place = Callable[[str, Mapping[str, Parameter], str], Mapping[str, Parameter]]


class LayerSource:
    """A source of decoder layers' variants in host memory, shared by all instances. Thread-safe.

    `load` reads or rounds a quantised variant once, and it stays in memory. If the devices have memory of their own,
    full precision stays too, and all variants lie in pinned memory if possible (`pinned.py`). Where the host is the
    device, full precision is read from the checkpoint's files each time, and must be what was loaded at the start.
    """

    def __init__(self, checkpoint: Checkpoint, padded_model: ModelConfig, *, pin_full: bool):
        """With `pin_full`, full precision stays in memory too."""
        self._checkpoint, self._padded_model, self._pin_full = checkpoint, padded_model, pin_full
        self._pinned: dict[tuple[str, str], Mapping[str, Parameter]] = {}
        self._lock = threading.Lock()

    def load(self, block: str, precision: str, place: Place | None = None) -> None:
        """Read a variant into memory if it is one that stays there, moved by `place` if that is given.

        Where the host is the device, `place` makes the arrays that layers run on; elsewhere it puts them into pinned
        memory. A variant that does not stay is read again when it is needed, and its tensors' checksums are taken now.
        """
        if precision in BITS or self._pin_full:
            with self._lock:
                if (block, precision) not in self._pinned:
                    parameters = self._read(block, precision)
                    pinned = place(block, parameters, precision) if place else parameters
                    # A prepared layer that was copied would otherwise be in memory twice.
                    if pinned is not parameters:
                        self._checkpoint.forget(block, precision)
                    self._pinned[block, precision] = pinned
        else:
            self._checkpoint.remember(block)

    def parameters(
        self, block: str, precision: str, between: Callable[[], None] | None = None
    ) -> Mapping[str, Parameter]:
        """Return a variant's parameters by their dotted paths: read-only host arrays, or what `load` has placed.

        If tensors have to be read, `between` is called before each of them, and may wait. Raise `CheckpointError` if
        tensors have changed in the checkpoint's files since the variant was loaded.
        """
        pinned = self._pinned.get((block, precision))
        return self._read(block, precision, between) if pinned is None else pinned

    @property
    def nbytes(self) -> int:
        """Bytes of the variants that stay in memory."""
        return sum(leaf.nbytes for variant in self._pinned.values() for leaf in jax.tree.leaves(dict(variant)))

    def close(self) -> None:
        """Free all variants that `load` has placed. No layer may use them any more."""
        with self._lock:
            for leaf in jax.tree.leaves([dict(variant) for variant in self._pinned.values()]):
                if isinstance(leaf, jax.Array):
                    leaf.delete()
            self._pinned.clear()

    def _read(self, block: str, precision: str, between: Callable[[], None] | None = None) -> Mapping[str, Parameter]:
        return self._checkpoint.variant(block, precision, self._padded_model, between)


class Throttle:
    """A throttle that makes one thread's copies wait, so that steps keep the memory's bandwidth and the cores.

    While `busy()` is true, the thread copies at most `rate` bytes/s and computes for at most a share `share` of the
    time. The share is the narrower bound for small arrays and for work without copies. Otherwise nothing waits.
    """

    def __init__(self, rate: float, share: float, busy: Callable[[], bool], wait: Callable[[float], object]):
        self._rate, self._share, self._busy, self._wait = rate, share, busy, wait
        self._begin()

    def copied(self, size: int) -> None:
        """Wait as long as is needed after `size` bytes were copied since the last call of `copied` or `worked`."""
        self._pause(size / self._rate)

    def worked(self) -> None:
        """Wait as long as is needed after work without a copy since the last call of `copied` or `worked`."""
        self._pause(0.0)

    def _pause(self, copy_seconds: float) -> None:
        work_seconds = (time.thread_time() - self._thread_time) / self._share
        remaining = max(copy_seconds, work_seconds) - (time.monotonic() - self._since)
        if remaining > 0 and self._busy():
            self._wait(remaining)
        self._begin()

    def _begin(self) -> None:
        self._since, self._thread_time = time.monotonic(), time.thread_time()
