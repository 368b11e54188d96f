"""Ledgers of devices: what owners book together, on devices that they may share."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, strategies as st

from jaxserve.control import DeviceLedgers, Ledger
from jaxserve.core.errors import MemoryBudgetError

SIZES = st.dictionaries(st.sampled_from(["weights", "kv"]), st.integers(0, 60), max_size=2)
ENTRIES = st.dictionaries(st.integers(0, 2), SIZES, max_size=3)


def ledgers(budget: int = 100) -> DeviceLedgers:
    return DeviceLedgers({device: Ledger(budget, {"runtime": 10}) for device in range(3)})


def entries_of(booked: DeviceLedgers) -> dict[int, dict[str, int]]:
    """Return the entries of all devices, without those of no bytes."""
    return {device: {n: size for n, size in ledger.entries.items() if size} for device, ledger in booked.items()}


@given(st.lists(st.tuples(st.sampled_from("ab"), ENTRIES), max_size=6))
def test_every_device_shows_the_sum_of_its_owners_latest_entries(updates: list) -> None:
    booked, latest = ledgers(), dict[str, dict[int, dict[str, int]]]()
    for owner, entries in updates:
        wanted = latest | {owner: entries}
        sums = {device: Counter({"runtime": 10}) for device in range(3)}
        for owned in wanted.values():
            for device, sizes in owned.items():
                sums[device].update(sizes)
        before = entries_of(booked)
        if all(sum(sizes.values()) <= 100 for sizes in sums.values()):
            booked.check(owner, entries)
            booked.update(owner, entries)
            latest = wanted
            assert entries_of(booked) == {device: dict(+sizes) for device, sizes in sums.items()}
        else:
            for method in (booked.check, booked.update):
                with pytest.raises(MemoryBudgetError, match=r"device \d: .* more than the budget"):
                    method(owner, entries)
            assert entries_of(booked) == before, "all or nothing"


def test_error_names_the_device_that_lacks_memory_and_no_device_changes() -> None:
    booked = ledgers()
    with pytest.raises(MemoryBudgetError, match=r"device 2: .*weights 0\.000 GB.* more than the budget"):
        booked.update("0", {0: {"weights": 5}, 2: {"weights": 91}})
    assert entries_of(booked) == {device: {"runtime": 10} for device in range(3)}


def test_spare_device_has_a_ledger_once_something_is_placed_there() -> None:
    booked = DeviceLedgers({0: Ledger(100)}, {5: Ledger(50, {"runtime": 10})})
    with pytest.raises(MemoryBudgetError, match="device 5"):
        booked.update("a", {5: {"kv": 41}})
    assert list(booked) == [0]
    booked.update("a", {5: {"kv": 40}})
    assert entries_of(booked) == {0: {}, 5: {"runtime": 10, "kv": 40}}
    booked.update("a", {})
    assert entries_of(booked) == {0: {}, 5: {"runtime": 10}}


def test_owner_that_leaves_a_device_gives_its_memory_back() -> None:
    booked = ledgers()
    booked.update("0", {0: {"weights": 90}})
    booked.update("0", {1: {"weights": 90}})
    assert (booked[0].free, booked[1].free) == (90, 0)
    assert booked.fullest is booked[1]
    booked.update("1", {0: {"weights": 90}})


def test_threads_of_owners_on_one_device_lose_no_update() -> None:
    booked, rounds = ledgers(10_000), 300

    def book(owner: int) -> None:
        for size in range(rounds):
            booked.update(str(owner), {0: {"kv": size}, 1: {"kv": 2 * size}})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(book, range(8)))
    assert booked[0].entries["kv"] == 8 * (rounds - 1)
    assert booked[1].entries["kv"] == 16 * (rounds - 1)
