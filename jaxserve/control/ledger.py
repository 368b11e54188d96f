"""Ledger: every resident byte of one memory (a device, or the host), against its budget."""

from collections.abc import Mapping

from jaxserve.core.errors import MemoryBudgetError


class Ledger:
    """Named entries in bytes. An entry is checked against the budget before the memory is taken."""

    def __init__(self, budget: int):
        self.budget = budget
        self.entries: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self.entries.values())

    @property
    def free(self) -> int:
        return self.budget - self.used

    def reserve(self, name: str, size: int) -> None:
        """Accounts `size` bytes under a new name. Raises `MemoryBudgetError` when they do not fit. Mutates."""
        assert name not in self.entries, name
        if size > self.free:
            needed = (self.used + size) / 1e9
            raise MemoryBudgetError(
                f"{name} needs {size / 1e9:.3f} GB, {self.free / 1e9:.3f} GB of the budget of "
                f"{self.budget / 1e9:.3f} GB are left; at least {needed:.3f} GB are needed (memory_gb)"
            )
        self.entries[name] = size

    def check(self, entries: Mapping[str, int]) -> None:
        """Raises `MemoryBudgetError` if the ledger with these sizes of its entries exceeded the budget."""
        total = sum((self.entries | dict(entries)).values())
        if total > self.budget:
            sizes = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in entries.items())
            raise MemoryBudgetError(
                f"{sizes} make {total / 1e9:.3f} GB in all, {(total - self.budget) / 1e9:.3f} GB more than the budget"
            )

    def update(self, entries: Mapping[str, int]) -> None:
        """Sets the sizes of entries. Raises as `check`, and then nothing has changed. Mutates."""
        self.check(entries)
        self.entries |= entries
