"""The ledgers, which check the resident bytes of each device against its budget before memory is taken."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

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
    Those of spare devices are not among these ledgers before an owner has entries there.
    """

    def __init__(self, ledgers: Mapping[int, Ledger], spare: Mapping[int, Ledger] | None = None):
        """The entries that the ledgers have already belong to no owner, and stay. `spare`: those of spare devices."""
        # Never changed, but replaced, because other threads may be reading it.
        self._ledgers, self._spare, self._lock = dict(ledgers), dict(spare or {}), threading.Lock()
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
            for device, sums in self._checked_sums(owners).items():
                self._of(device).update(sums)
                if device in self._spare:
                    self._ledgers = {**self._ledgers, device: self._spare.pop(device)}
            for owner, entries in owners.items():
                self._owned[owner] = {device: dict(sizes) for device, sizes in entries.items()}
                if not entries:
                    del self._owned[owner]

    def _of(self, device: int) -> Ledger:
        return self._ledgers[device] if device in self._ledgers else self._spare[device]

    def _checked_sums(self, owners: Mapping[str, DeviceEntries]) -> dict[int, dict[str, int]]:
        """Return the sums over all owners on each device that changes. Raise `MemoryBudgetError` if they do not fit."""
        before = {owner: self._owned.get(owner, {}) for owner in owners}
        all_sums = {}
        for device in dict.fromkeys(device for side in (before, owners) for each in side.values() for device in each):
            sums = Counter(self._of(device).entries)
            for owner, entries in owners.items():
                sums.subtract(before[owner].get(device, {}))
                sums.update(entries.get(device, {}))
            try:
                self._of(device).check(sums)
            except MemoryBudgetError as error:
                raise MemoryBudgetError(f"device {device}: {error}") from None
            all_sums[device] = dict(sums)
        return all_sums
