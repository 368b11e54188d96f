"""The ledgers, which check the resident bytes of each device against its budget before memory is taken."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from jaxserve.core.errors import MemoryBudgetError

DeviceEntries = Mapping[int, Mapping[str, int]]  # device -> name of an entry -> bytes


class Ledger:
    """A ledger of named entries in bytes, which are checked against the budget before the memory is taken."""

    def __init__(self, budget: int, entries: Mapping[str, int] | None = None):
        self.budget = budget
        self.entries: Mapping[str, int] = dict(entries or {})

    @property
    def used(self) -> int:
        """Sum of all entries in bytes."""
        return sum(self.entries.values())

    @property
    def free(self) -> int:
        """Bytes of the budget that remain."""
        return self.budget - self.used

    def check(self, entries: Mapping[str, int]) -> None:
        """Raise `MemoryBudgetError` if the ledger would exceed the budget with these entries."""
        total = sum({**self.entries, **entries}.values())
        if total > self.budget:
            sizes = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in entries.items())
            raise MemoryBudgetError(
                f"{sizes} make {total / 1e9:.3f} GB in all, {(total - self.budget) / 1e9:.3f} GB more than the budget"
            )

    def update(self, entries: Mapping[str, int]) -> None:
        """Set the sizes of entries. Raise `MemoryBudgetError` if they exceed the budget; then nothing changes."""
        self.check(entries)
        # Another mapping, because other threads may be reading the old one.
        self.entries = {**self.entries, **entries}


class DeviceLedgers(Mapping[int, Ledger]):
    """The ledgers of several devices by their index, changed together or not at all. Thread-safe.

    Every owner, such as an instance, has entries of its own. A ledger shows their sums: instances may share a device.
    """

    def __init__(self, ledgers: Mapping[int, Ledger], new: Callable[[], Ledger] | None = None):
        """The entries that `ledgers` have already belong to no owner, and stay.

        `new` returns the ledger of a further device, which gets it once something is placed there.
        """
        self._ledgers, self._new, self._lock = dict(ledgers), new, threading.Lock()
        self._owned: dict[str, DeviceEntries] = {}

    def __getitem__(self, device: int) -> Ledger:
        return self._ledgers[device]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ledgers)

    def __len__(self) -> int:
        return len(self._ledgers)

    @property
    def fullest(self) -> Ledger:
        """The ledger with the fewest free bytes."""
        return min(self._ledgers.values(), key=lambda ledger: ledger.free)

    def check(self, owner: str, entries: DeviceEntries) -> None:
        """Raise `MemoryBudgetError` that names the device if a budget would be exceeded with these entries of an owner.

        They replace all entries that the owner has.
        """
        with self._lock:
            self._checked_sums({owner: entries})

    def update(self, owner: str, entries: DeviceEntries) -> None:
        """Replace all entries of an owner.

        Raise `MemoryBudgetError` that names the device if they exceed its budget; then nothing changes.
        """
        self.replace({owner: entries})

    def replace(self, owners: Mapping[str, DeviceEntries]) -> None:
        """Replace all entries of several owners at once. An owner without entries is forgotten.

        Raise `MemoryBudgetError` that names the device if they exceed its budget; then nothing changes.
        """
        with self._lock:
            all_sums = self._checked_sums(owners)
            # Another mapping, because other threads may be reading the old one.
            self._ledgers = {**self._ledgers, **{device: self._ledger(device) for device in all_sums}}
            for device, sums in all_sums.items():
                self._ledgers[device].update(sums)
            for owner, entries in owners.items():
                self._owned[owner] = {device: dict(sizes) for device, sizes in entries.items()}
                if not entries:
                    del self._owned[owner]

    def _checked_sums(self, owners: Mapping[str, DeviceEntries]) -> dict[int, dict[str, int]]:
        """Return the sums over all owners on each device that changes. Raise `MemoryBudgetError` if they do not fit."""
        before = {owner: self._owned.get(owner, {}) for owner in owners}
        all_sums = {}
        for device in dict.fromkeys(device for side in (before, owners) for each in side.values() for device in each):
            ledger = self._ledger(device)
            sums = Counter(ledger.entries)
            for owner, entries in owners.items():
                sums.subtract(before[owner].get(device, {}))
                sums.update(entries.get(device, {}))
            try:
                ledger.check(sums)
            except MemoryBudgetError as error:
                raise MemoryBudgetError(f"device {device}: {error}") from None
            all_sums[device] = dict(sums)
        return all_sums

    def _ledger(self, device: int) -> Ledger:
        """Return the ledger of a device, a new one if it has none."""
        if device not in self._ledgers and self._new is not None:
            return self._new()
        return self._ledgers[device]
