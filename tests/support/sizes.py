"""Sizes of an engine that several tests ask for."""

from jaxserve.planning.memory import MemoryPlan


def page_bytes(memory: MemoryPlan) -> int:
    """Return the bytes of one KV page in the pools of the first stage's layers."""
    return memory.limits.page_bytes(memory.plan.instances[0].stages[0])
