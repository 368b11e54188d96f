"""validate: whether a plan is one that the machine can hold."""

from collections import Counter

from jaxserve.control.plan import Plan
from jaxserve.control.resources import Resources
from jaxserve.core.errors import PlanError


def validate(plan: Plan, resources: Resources) -> None:
    """Raises `PlanError` naming what is wrong and the limit it breaks.

    What `diff` puts between two valid plans is valid too: bytes fall to what both have, then rise.
    """
    devices = Counter(device for instance in plan.instances for stage in instance.stages for device in stage.devices)
    for device, stages in devices.items():
        if stages > 1:
            raise PlanError(f"device {device} has {stages} stages, it can have one")
    for number, instance in enumerate(plan.instances):
        if len(instance.stages) != len(resources.fixed):
            raise PlanError(f"instance {number} has {len(instance.stages)} stages, there are {len(resources.fixed)}")
        for index, stage in enumerate(instance.stages):
            where = f"instance {number}, stage {index}"
            if not resources.least_pages <= stage.kv_pages <= resources.most_pages:
                raise PlanError(
                    f"{where} has {stage.kv_pages} KV pages, it must be from {resources.least_pages} (max_model_len) "
                    f"to {resources.most_pages} (max_kv_pages)"
                )
            if stage.kv_pages != instance.kv_pages:
                raise PlanError(f"{where} has {stage.kv_pages} KV pages, stage 0 has {instance.kv_pages}")
            needed = resources.stage_bytes(index, stage)
            if needed > resources.budget:
                raise PlanError(
                    f"{where} needs {needed / 1e9:.3f} GB per device, the budget is {resources.budget / 1e9:.3f} GB; "
                    f"beside its layers {resources.kv_capacity(instance) or 'no'} KV pages fit (memory_gb)"
                )
