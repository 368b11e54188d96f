"""Measurement of device time on the host: many calls are dispatched, and the host waits only for the last one."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from bench.gpu_parts import Row

ROUNDS = 5
MAX_CALLS = 1000


def seconds_per_call(call: Callable[[], Any], min_round_s: float) -> float:
    """Return the median seconds per call over rounds of at least `min_round_s` seconds.

    The first call, which compiles, is not measured. A device executes calls in the order of dispatch, so the last
    result ends all of them. A call must take longer than its dispatch, about 20 µs, or the dispatch is measured
    instead.
    """
    jax.block_until_ready(call())
    once = _seconds(call, 1)
    calls = min(max(math.ceil(min_round_s / once), 1), MAX_CALLS)
    return statistics.median(_seconds(call, calls) / calls for _ in range(ROUNDS))


def timed_row(labels: Row, measure: Callable[[], float]) -> Row:
    """Return a row with its seconds, or with the error: out of memory, or a program that the compiler refuses."""
    try:
        return {**labels, "seconds": measure()}
    except Exception as error:
        return {**labels, "error": f"{type(error).__name__}: {error}"[:500]}


def _seconds(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - start
