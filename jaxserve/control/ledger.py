"""The ledger, which checks the resident bytes of one memory (a device's or the host's) against its budget."""

import threading
from collections.abc import Mapping

from jaxserve.core.errors import MemoryBudgetError


class Ledger:
    """A ledger of named entries in bytes, which are checked against the budget before the memory is taken."""

    def __init__(self, budget: int):
        self.budget = budget
        self.entries: dict[str, int] = {}

    def copy(self) -> "Ledger":
        """Return a ledger with the same budget and entries."""
        ledger = Ledger(self.budget)
        ledger.entries = dict(self.entries)
        return ledger

    @property
    def used(self) -> int:
        """Sum of all entries in bytes."""
        return sum(self.entries.values())

    @property
    def free(self) -> int:
        """Bytes of the budget that remain."""
        return self.budget - self.used

    def reserve(self, name: str, size: int) -> None:
        """Add an entry of `size` bytes under a new name. Raise `MemoryBudgetError` if it does not fit the budget."""
        assert name not in self.entries, name
        if size > self.free:
            needed = (self.used + size) / 1e9
            raise MemoryBudgetError(
                f"{name} needs {size / 1e9:.3f} GB, {self.free / 1e9:.3f} GB of the budget of "
                f"{self.budget / 1e9:.3f} GB are left; at least {needed:.3f} GB are needed (memory_gb)"
            )
        self.entries[name] = size

    def check(self, entries: Mapping[str, int]) -> None:
        """Raise `MemoryBudgetError` if the ledger would exceed the budget with these entries."""
        total = sum((self.entries | dict(entries)).values())
        if total > self.budget:
            sizes = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in entries.items())
            raise MemoryBudgetError(
                f"{sizes} make {total / 1e9:.3f} GB in all, {(total - self.budget) / 1e9:.3f} GB more than the budget"
            )

    def update(self, entries: Mapping[str, int]) -> None:
        """Set the sizes of entries. Raise `MemoryBudgetError` if they exceed the budget; then nothing changes."""
        self.check(entries)
        self.entries |= entries


class DeviceLedgers:
    """The ledgers of several devices by their index, changed together or not at all. Thread-safe."""

    def __init__(self, ledgers: Mapping[int, Ledger]):
        self._ledgers, self._lock = dict(ledgers), threading.Lock()

    def __getitem__(self, device: int) -> Ledger:
        return self._ledgers[device]

    def check(self, entries: Mapping[int, Mapping[str, int]]) -> None:
        """Raise `MemoryBudgetError` that names the device if a ledger would exceed its budget with these entries."""
        with self._lock:
            self._check(entries)

    def update(self, entries: Mapping[int, Mapping[str, int]]) -> None:
        """Set the sizes of entries by device. Raise `MemoryBudgetError` if they do not fit; then nothing changes."""
        with self._lock:
            self._check(entries)
            for device, sizes in entries.items():
                self._ledgers[device].update(sizes)

    def _check(self, entries: Mapping[int, Mapping[str, int]]) -> None:
        for device, sizes in entries.items():
            try:
                self._ledgers[device].check(sizes)
            except MemoryBudgetError as error:
                raise MemoryBudgetError(f"device {device}: {error}") from None
