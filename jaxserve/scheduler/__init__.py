"""Continuous batching with chunked prefill, priorities and preemption by recomputation. No JAX."""

from jaxserve.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = ["Scheduler", "SchedulerLimits"]
