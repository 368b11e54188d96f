"""Where the parameters of a layer's variants come from, and how fast they may be copied."""

import threading
import time
from collections.abc import Callable, Mapping

import jax

from jaxserve.checkpoint import Checkpoint
from jaxserve.core.config import ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.executor.blocks import Parameter

Place = Callable[[str, Mapping[str, Parameter], str], Mapping[str, Parameter]]  # block, parameters, precision


class LayerSource:
    """Variants of decoder layers in host memory, shared by all instances. Thread-safe.

    Quantised variants are loaded (or rounded) once, by `load`, and stay. So does full precision where devices have
    memory of their own, and all of it in pinned memory if they have that too (`keeping.py`). Where the host is the
    device, full precision is read from the checkpoint's files each time, and must be what was loaded at the start.
    """

    def __init__(self, checkpoint: Checkpoint, padded: ModelConfig, *, pin_full: bool):
        self._checkpoint, self._padded, self._pin_full = checkpoint, padded, pin_full
        self._pinned: dict[tuple[str, str], Mapping[str, Parameter]] = {}
        self._lock = threading.Lock()

    def load(self, block: str, precision: str, place: Place | None = None) -> None:
        """Takes a variant into memory, if it is one that is kept. `place` makes of it what is kept: where the host is
        the device the arrays that a row uses, elsewhere arrays in pinned memory. One that is not kept is read again
        when it is needed, and must then be what it is now. Mutates.
        """
        if precision in BITS or self._pin_full:
            with self._lock:
                if (block, precision) not in self._pinned:
                    parameters = self._read(block, precision)
                    kept = place(block, parameters, precision) if place else parameters
                    if kept is not parameters:  # else a prepared layer would be in memory twice
                        self._checkpoint.forget(block, precision)
                    self._pinned[block, precision] = kept
        else:
            self._checkpoint.remember(block)

    def parameters(
        self, block: str, precision: str, between: Callable[[], None] | None = None
    ) -> Mapping[str, Parameter]:
        """A variant's parameters by their dotted paths: arrays of the host, read-only, or what `load` has placed. Where
        tensors have to be read, `between` is called before each, and may wait. Raises `CheckpointError` if they are not
        what they were when the variant was loaded.
        """
        kept = self._pinned.get((block, precision))
        return self._read(block, precision, between) if kept is None else kept

    @property
    def nbytes(self) -> int:
        """Host memory of what is kept."""
        return sum(leaf.nbytes for variant in self._pinned.values() for leaf in jax.tree.leaves(dict(variant)))

    def close(self) -> None:
        """Frees what has been placed; nothing may be in use. Mutates."""
        with self._lock:
            for leaf in jax.tree.leaves([dict(variant) for variant in self._pinned.values()]):
                if isinstance(leaf, jax.Array):
                    leaf.delete()
            self._pinned.clear()

    def _read(self, block: str, precision: str, between: Callable[[], None] | None = None) -> Mapping[str, Parameter]:
        return self._checkpoint.variant(block, precision, self._padded, between)


class Throttle:
    """Spreads a copy over time, so that steps keep the memory's bandwidth and the cores. For one thread.

    While `busy`, a copy takes at least its bytes over `rate` (bytes/s), and its thread at most `share` of a core, which
    is the narrower bound for small arrays, and where nothing is copied; otherwise it goes as fast as it can.
    """

    def __init__(self, rate: float, share: float, busy: Callable[[], bool], wait: Callable[[float], object]):
        self._rate, self._share, self._busy, self._wait = rate, share, busy, wait
        self._begin()

    def copied(self, size: int) -> None:
        """Waits for what is left of the time that `size` bytes are to take, or the thread's work since the call before,
        counted from that call. Mutates.
        """
        self._pause(size / self._rate)

    def worked(self) -> None:
        """The same where nothing has been copied. Mutates."""
        self._pause(0.0)

    def _pause(self, least: float) -> None:
        least = max(least, (time.thread_time() - self._worked) / self._share)
        left = least - (time.monotonic() - self._since)
        if left > 0 and self._busy():
            self._wait(left)
        self._begin()

    def _begin(self) -> None:
        self._since, self._worked = time.monotonic(), time.thread_time()
