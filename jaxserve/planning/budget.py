"""Memory budgets that are larger than the memory, and models that are larger than the budget."""

import logging
from collections.abc import Mapping

from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS
from jaxserve.planning.spec import EngineSpec

log = logging.getLogger(__name__)

DEGREES = (2, 4, 8, 16, 32, 64)
FULL, SMALLEST = 16, 4.25  # bits of a weight in full precision, and in int4 with its scales


def check_memory_gb(memory_gb: float, limit: tuple[int, str] | None, free: int | None) -> None:
    """Raise `ConfigError` if a budget is above the limit (bytes, its name), and warn if it is above what is free."""
    if limit is not None and memory_gb * 1e9 > limit[0]:
        size, name = limit
        raise ConfigError(
            f"memory_gb is {memory_gb:g}: it must be at most {size / 1e9:.3f}, {name} in GB (--memory-gb)"
        )
    if free is not None and memory_gb * 1e9 > free:
        log.warning("memory_gb is %g, of which only %.3f GB are free now (--memory-gb)", memory_gb, free / 1e9)


def what_helps(spec: EngineSpec, needs: Mapping[str, int], budget: int) -> str:
    """Return the options with which a model would fit a budget, as the end of an error.

    `needs` has the bytes by part on one of its devices, which has `budget` bytes. What is said of more devices and of
    smaller weights is an estimate.
    """
    tp, whole = spec.config.tp, sum(needs.values())
    advice = ["a larger --memory-gb, or a smaller --max-model-len or --max-num-seqs"]
    is_full = not any(precision in BITS for precision in spec.plan.instances[0].layer_precisions)
    if is_full and whole - needs["weights"] * (1 - SMALLEST / FULL) <= budget:
        advice.insert(0, "--precision int4 makes the weights smaller")
    degree = next((each for each in DEGREES if each > tp and whole * tp / each <= budget), None)
    if degree and spec.platform != "cpu":  # whose devices share one memory
        advice.insert(0, f"--tp {degree} divides it over {degree} devices")
    return "; ".join(advice)
