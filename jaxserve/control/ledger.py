"""Ledger: every resident byte of one memory (a device, or the host), against its budget."""

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

    def release(self, name: str) -> int:
        """Forgets an entry and returns its bytes. Mutates."""
        return self.entries.pop(name)
