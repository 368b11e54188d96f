"""The limits that the machine and the model set for a plan, in bytes by device."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from jaxserve.control.costs import CostModel
from jaxserve.control.degree_limits import DegreeLimits
from jaxserve.control.plan import InstancePlan, Plan, StagePlan
from jaxserve.control.stage_sizes import StageSizes
from jaxserve.core.block_names import is_layer
from jaxserve.core.errors import PlanError
from jaxserve.core.kv_layout import pages_covered
from jaxserve.core.renamed import Renamed
from jaxserve.core.step_shapes import Buckets

DEFAULT_SHAPES = Buckets(max_num_seqs=256, max_tiles=64, tile=32, min_rows=1, widths=(1,))


@dataclass(frozen=True)
class Resources:
    """Limits of plans. Bytes are those on each device.

    Next to the parts that `sizes` knows, KV pages and the process itself take memory. The swap buffer among these parts
    has room for the smaller variant of one layer, so that a swap needs no more memory than the larger of the plans
    before and after it.

    Limits on pages are those of instances as they are at the start; `limits_of` has those of every degree of tensor
    parallelism.
    """

    budget: int  # bytes of each device
    sizes: StageSizes
    min_pages: int  # smallest number of KV pages, the null page included, as in all numbers of pages here
    max_pages: int  # largest number of KV pages that the pools have room for
    copy_rate: float  # bytes/s of copies from host memory while steps go on
    link_rate: float = 1e9  # bytes/s of each device's copies to others and from them, while no step runs on it
    memory_rate: float = 1e10  # bytes/s of copies within a device
    link_latency: float = 0.0  # s until a copy between devices begins
    runtime: int = 0  # bytes of each device that the process takes besides arrays
    segments: tuple[int, ...] = ()  # pages of each segment that pools grow by; () if they grow page by page
    granule: int = 0  # bytes that a pool which grows page by page may take beyond its pages
    start_pages: int = 0  # KV pages at the start; until a pool has more, it takes no more than it has room for
    # What steps cost under any plan; None if it is unknown. It is no limit, and no part of equality.
    costs: CostModel | None = field(default=None, compare=False, repr=False)
    shapes: Buckets = DEFAULT_SHAPES  # of steps
    page_size: int = 16  # tokens
    max_len: int = 0  # tokens of the longest sequence; 0: as many as the smallest number of KV pages holds
    # By degree of tensor parallelism and by lanes; () if instances are neither merged nor grouped.
    degrees: tuple[DegreeLimits, ...] = ()
    # Devices of the machine, which plans name by their indices; 0 if unknown. Sizes do not depend on it.
    devices: int = field(default=0, compare=False)
    exchanged_pages: int = 64  # of one layer, by one call, when instances merge or split
    least_pages = Renamed("min_pages")
    most_pages = Renamed("max_pages")
    kept = Renamed("in_place")

    @property
    def in_place(self) -> tuple[str, ...]:
        """Precisions in which layers run on held variants and take no more memory."""
        return self.sizes.in_place

    def limits_of(self, tp: int, lanes: int = 1) -> DegreeLimits:
        """Return the limits of instances on `tp` devices, or of groups with several lanes on `tp` devices each.

        Raise `PlanError` if no instance may have as many.
        """
        if not self.degrees and lanes == 1:
            max_len = self.max_len or (self.min_pages - 1) * self.page_size
            pages = (self.min_pages, self.max_pages, self.start_pages, self.max_pages)
            return DegreeLimits(tp, max_len, *pages, self.segments, self.shapes)
        found = next((limits for limits in self.degrees if (limits.tp, limits.lanes) == (tp, lanes)), None)
        if found is not None:
            return found
        if lanes > 1:
            raise PlanError(
                f"a group has {lanes} instances with {tp} devices for each layer: it must have at most "
                f"{self.max_lanes}, with as many devices as at the start (max_pp)"
            )
        degrees = ", ".join(str(limits.tp) for limits in self.degrees if limits.lanes == 1)
        raise PlanError(f"an instance has {tp} devices: it must have one of {degrees} (tp, max_tp)")

    @property
    def max_lanes(self) -> int:
        """The largest number of instances that may share their layers; 1 if none may."""
        return max((limits.lanes for limits in self.degrees), default=1)

    @property
    def max_tp(self) -> int:
        """The largest degree of tensor parallelism that an instance may have; 0 if instances are never merged."""
        tps = [limits.tp for limits in self.degrees]
        return max(tps) if len(set(tps)) > 1 else 0

    # -- one layer

    def precisions(self, block: str) -> tuple[str, ...]:
        """Return the precisions that a decoder layer may have, the largest first; () for other blocks."""
        return self.sizes.precisions(block)

    def bytes_of(self, block: str, precision: str, tp: int | None = None) -> int:
        """Return the bytes of a decoder layer on each of `tp` devices, by default as many as at the start.

        Raise `PlanError` if it cannot have this precision.
        """
        self._check_precision(block, precision)
        return self.sizes.block(block, precision, tp)

    def bytes_taken(self, block: str, precision: str, tp: int | None = None) -> int:
        """Return the bytes that a decoder layer takes besides held variants: 0 if it uses its own one in place.

        Raise `PlanError` if it cannot have this precision.
        """
        size = self.bytes_of(block, precision, tp)
        return 0 if precision in self.in_place else size

    def smallest(self, instance: InstancePlan) -> InstancePlan:
        """Return an instance's plan with all layers in the precisions in which they take the least memory."""
        precisions = {
            block.block: self._smallest_precision(block.block, stage.tp)
            for stage in instance.stages
            for block in stage.blocks
            if is_layer(block.block)
        }
        return instance.with_precisions(precisions)

    # -- stages and devices

    def page_bytes(self, stage: StagePlan) -> int:
        """Return the bytes of one KV page in the pools of all layers of a stage."""
        return self.sizes.page(stage)

    def stage_entries(self, stage: StagePlan) -> dict[str, int]:
        """Return the bytes that a stage takes on each of its devices, by the name of the ledger's entry.

        Raise `PlanError` if a block cannot have its precision.
        """
        entries = self._entries_without_pages(stage) | {"kv": _Pools.of(stage, self).bytes(stage.kv_pages)}
        return {name: size for name, size in entries.items() if size}

    def device_entries(self, *instances: InstancePlan) -> dict[int, dict[str, int]]:
        """Return the bytes that instances take on each of their devices, by the name of the ledger's entry.

        What the process takes besides arrays (`runtime`) is not among them. Raise `PlanError` if a block cannot have
        its precision.
        """
        sums: dict[int, Counter[str]] = {}
        for instance in instances:
            for stage in instance.stages:
                entries = self.stage_entries(stage)
                for device in stage.devices:
                    sums.setdefault(device, Counter()).update(entries)
        return {device: dict(entries) for device, entries in sums.items()}

    def device_bytes(self, *instances: InstancePlan) -> dict[int, int]:
        """Return all bytes that are taken on each device of instances, if nothing else runs there.

        Raise `PlanError` if a block cannot have its precision.
        """
        entries = self.device_entries(*instances)
        return {device: self.runtime + sum(sizes.values()) for device, sizes in entries.items()}

    def change(self, before: InstancePlan, after: InstancePlan) -> dict[int, int]:
        """Return the bytes that each device of an instance has to give if its plan changes; negative if it gets some.

        Raise `PlanError` if a block cannot have its precision.
        """
        old, new = self.device_bytes(before), self.device_bytes(after)
        return {device: new.get(device, self.runtime) - old.get(device, self.runtime) for device in {**old, **new}}

    # -- KV pages

    def pages_taken(self, tp: int, pages: int) -> int:
        """Return how many pages take memory in one lane of a pool that has `pages`."""
        segments = self.limits_of(tp).segments
        return pages_covered(segments, pages) if segments else pages

    def kv_capacity(self, instance: InstancePlan) -> int:
        """Return the largest number of KV pages that fit besides an instance's layers, at most those of its degree.

        Every device must hold them, because page ids are valid in all stages. Whole segments, if pools have segments,
        and equally many pages in all lanes.
        """
        rooms = [
            (self.budget - self.runtime - sum(map(self._bytes_without_pages, stages)), self._pools(stages))
            for stages in {tuple(stages) for stages in stages_by_device((instance,)).values()}
        ]

        def too_many(pages: int) -> bool:
            return any(sum(pool.bytes(pages) for pool in pools) > room for room, pools in rooms)

        most = self.limits_of(instance.tp, instance.lanes).max_pages
        return bisect_left(range(1, most + 1), True, key=too_many) // instance.lanes * instance.lanes

    def max_capacity(self, instance: InstancePlan) -> int:
        """Return the largest number of KV pages that an instance can have, with all its layers at their smallest."""
        return self.kv_capacity(self.smallest(instance))

    def _smallest_precision(self, block: str, tp: int) -> str:
        return min(self.precisions(block), key=lambda precision: self.bytes_taken(block, precision, tp))

    def _pools(self, stages: Iterable[StagePlan]) -> list["_Pools"]:
        return [_Pools.of(stage, self) for stage in stages]

    def _bytes_without_pages(self, stage: StagePlan) -> int:
        return sum(self._entries_without_pages(stage).values())

    def _entries_without_pages(self, stage: StagePlan) -> dict[str, int]:
        for block in stage.blocks:
            if is_layer(block.block):
                self._check_precision(block.block, block.precision)
        return dict(self.sizes.entries(stage))

    def _check_precision(self, block: str, precision: str) -> None:
        known = self.precisions(block)
        if precision not in known:
            allowed = f"choose from {', '.join(known)}" if known else "it cannot change"
            raise PlanError(f"{block} cannot have precision {precision!r}: {allowed} (variants)")


@dataclass(frozen=True)
class _Pools:
    """The KV pools of one stage on each of its devices."""

    page: int  # bytes of one page in all pools
    granules: int  # bytes that the pools may take beyond their pages
    limits: DegreeLimits

    @classmethod
    def of(cls, stage: StagePlan, resources: Resources) -> "_Pools":
        count = sum(is_layer(block.block) for block in stage.blocks)
        page = resources.page_bytes(stage)
        return cls(page, count * stage.lanes * resources.granule, resources.limits_of(stage.tp, stage.lanes))

    def bytes(self, pages: int) -> int:
        """Return the bytes that the pools take while `pages` may be in use."""
        limits = self.limits
        if limits.segments:
            return pages_covered(limits.segments, pages) * self.page
        # What the granules take at the start stays theirs, so that pages grow by exactly the bytes that layers free.
        empty = max(0, limits.room - min(pages, limits.start_pages))
        return pages * self.page + min(self.granules, empty * self.page)


def stages_by_device(instances: Iterable[InstancePlan]) -> dict[int, list[StagePlan]]:
    """Return the stages that each device takes part in."""
    stages: dict[int, list[StagePlan]] = {}
    for instance in instances:
        for stage in instance.stages:
            for device in stage.devices:
                stages.setdefault(device, []).append(stage)
    return stages


def validate(plan: Plan, resources: Resources, present: Collection[InstancePlan] = ()) -> None:
    """Raise `PlanError` that names the fault and the limit if a plan does not fit.

    Instances that are `present` may have any number of KV pages: a change that has failed may have left them with few.
    The plans that `diff` leads through from one valid plan to another are valid too, as memory is freed before it is
    taken.
    """
    if not plan.instances:
        raise PlanError("the plan has no instance: at least one must remain, for the requests in flight")
    for instance in plan.instances:
        if instance not in present:
            _check_pages(instance, resources)
    _check_devices(plan.instances, resources)


def validate_instance(instance: InstancePlan, resources: Resources) -> None:
    """Raise `PlanError` that names the fault and the limit if the plan of one instance does not fit its devices.

    Other instances that share a device are left out.
    """
    _check_pages(instance, resources)
    _check_devices((instance,), resources)


def _check_pages(instance: InstancePlan, resources: Resources) -> None:
    if instance.max_num_seqs is not None and instance.max_num_seqs < 1:
        raise PlanError(
            f"instance {instance.name} runs at most {instance.max_num_seqs} sequences: it must be at least 1"
        )
    for index, stage in enumerate(instance.stages):
        where, limits = f"instance {instance.name}, stage {index}", resources.limits_of(stage.tp, stage.lanes)
        if not limits.min_pages <= stage.kv_pages <= limits.max_pages:
            raise PlanError(
                f"{where} has {stage.kv_pages} KV pages: it must be from {limits.min_pages} (max_model_len) "
                f"to {limits.max_pages} (max_kv_pages)"
            )
        if stage.kv_pages % stage.lanes:
            raise PlanError(f"{where} has {stage.kv_pages} KV pages in {stage.lanes} lanes: all have equally many")
        if stage.kv_pages != instance.kv_pages:
            raise PlanError(
                f"{where} has {stage.kv_pages} KV pages: it must have {instance.kv_pages}, as many as stage 0"
            )


def _check_devices(instances: tuple[InstancePlan, ...], resources: Resources) -> None:
    for instance in instances:
        unknown = sorted(device for device in instance.devices if not 0 <= device < (resources.devices or inf))
        if unknown:
            raise PlanError(
                f"instance {instance.name} is on device {unknown[0]}: the devices are 0 to {resources.devices - 1}"
            )
    needs = resources.device_bytes(*instances)
    device = max(needs, key=lambda index: needs[index])
    excess = needs[device] - resources.budget
    if excess <= 0:
        return
    entries = {"runtime": resources.runtime, **resources.device_entries(*instances)[device]}
    largest_first = sorted(entries.items(), key=lambda entry: -entry[1])
    parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in largest_first if size)
    raise PlanError(
        f"device {device} needs {needs[device] / 1e9:.3f} GB ({parts}), {excess / 1e6:.1f} MB more than the budget of "
        f"{resources.budget / 1e9:.3f} GB{_capacity(device, instances, resources)} (memory_gb)"
    )


def _capacity(device: int, instances: Iterable[InstancePlan], resources: Resources) -> str:
    """Return how many KV pages would fit, in words, if the device belongs to one instance."""
    own = [instance for instance in instances if any(device in stage.devices for stage in instance.stages)]
    if len(own) > 1:
        return ""
    return f": {resources.kv_capacity(own[0]) or 'no'} KV pages fit besides its layers"
