"""Division of a device's memory into weights, workspace, KV pages and the rest.

Imports no JAX, so that the simulator divides the memory of simulated devices by the same code.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jaxserve.control.ledger import DeviceLedgers, Ledger
from jaxserve.control.plan import InstancePlan, Plan, StagePlan
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.core.kv_layout import pages_covered, segments_for
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import BITS
from jaxserve.core.step_shapes import Buckets
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.planning.spec import STATIC, EngineSpec
from jaxserve.planning.workspace import PinnedVariants, Sizes, StageMemory, stage_memory
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import Snapshot

log = logging.getLogger(__name__)

# Host memory of a process, measured on Linux with jax 0.10 (2026-11-27) at first starts, which compile. Later starts
# load what was compiled and need 250 MB less.
RUNTIME = 420_000_000  # bytes: interpreter, JAX and server, with a margin of about 60 MB
PROGRAM = 2_000_000  # bytes of a block's program for one step shape
FUSED_LAYER = 500_000  # bytes of each layer in a program that runs a whole step
PROGRAMS = 3  # programs per step shape besides those of the layers
MAX_FORESEEN = 4  # precision assignments that a policy names in advance, in addition to the one at the start
POLICIES_WITHOUT_FORESIGHT = (STATIC, "manual")

MAX_POOL_BYTES = 2**46  # half of what a process can address
STAGE_ENTRIES = ("weights", "variants", "kv", "workspace", "exchange")  # ledger entries that depend on the stage

# Limits on the copies of a change of the plan while steps go on, which need the memory's bandwidth and the cores.
COPY_RATES = {"cpu": 0.25e9, "gpu": 8e9, "tpu": 8e9}  # bytes/s
COPY_SHARES = {"cpu": 0.05, "gpu": 1.0, "tpu": 1.0}  # of a core, for the thread that copies


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of everything in an engine that takes memory. `ledger` is that of the fullest device."""

    config: EngineConfig
    plan: Plan
    variants: tuple[str, ...]  # precisions that any layer may change to while serving; () if layers never change
    kv_dtype: str
    segments: tuple[int, ...]  # pages of each segment that KV pools may grow to
    max_model_len: int  # tokens
    buckets: Buckets
    ledger: Ledger
    stages: tuple[StageMemory, ...]
    layer_bytes: Mapping[tuple[str, str], int]  # (layer, precision) -> bytes on each device of its stage
    pinned: PinnedVariants
    granule: int  # bytes by which an elastic pool grows; 0: pools take whole segments

    @property
    def reserved_kv_pages(self) -> int:
        """Largest number of KV pages that the pools can grow to, the null page included."""
        return sum(self.segments)

    def stage_bytes(self, plan: Plan) -> tuple[tuple[int, int, int], ...]:
        """Return (weights, pinned variants, KV) in bytes per device for every stage of a plan, instance by instance."""
        first = self.plan.instances[0].stages
        sizes = []
        for instance in plan.instances:
            for memory, stage, start in zip(self.stages, instance.stages, first, strict=True):
                weights = memory.weights + self._layer_bytes(stage) - self._layer_bytes(start)
                variants = memory.variants - self._in_place_bytes(stage) + self._in_place_bytes(start)
                sizes.append((weights, variants, self.kv_bytes(memory, stage.kv_pages)))
        return tuple(sizes)

    def kv_bytes(self, memory: StageMemory, pages: int) -> int:
        """Return the bytes that a stage's KV pools take on each device while `pages` are in use."""
        return _kv_bytes(memory, pages, self.segments, self.granule)

    def ledger_entries(self, plan: Plan) -> dict[str, int]:
        """Return the ledger entries that depend on the plan, for its fullest stage."""
        memories = self.stages * len(plan.instances)
        stages = (
            (*sizes, memory.workspace, memory.swap_buffer)
            for memory, sizes in zip(memories, self.stage_bytes(plan), strict=True)
        )
        entries = dict(zip(STAGE_ENTRIES, max(stages, key=sum), strict=True))
        return {name: size for name, size in entries.items() if name in self.ledger.entries}

    @cached_property
    def ledgers(self) -> DeviceLedgers:
        """The ledgers of all devices by their index. That of the first device is `ledger`."""
        stages = [stage for instance in self.plan.instances for stage in instance.stages]
        first, *others = (device for stage in stages for device in stage.devices)
        return DeviceLedgers({first: self.ledger} | {device: self.ledger.copy() for device in others})

    def device_entries(self, instance: InstancePlan) -> dict[int, dict[str, int]]:
        """Return the ledger entries of an instance's plan by device."""
        entries = self.ledger_entries(Plan(0, (instance,)))
        return {device: entries for stage in instance.stages for device in stage.devices}

    def resources(self, copy_rate: float) -> Resources:
        """Return the limits of plans, with copies estimated at `copy_rate` bytes/s.

        If the user set `kv_pages` without `max_kv_pages`, pages grow only by what smaller weights free.
        """
        others = sum(size for name, size in self.ledger.entries.items() if name not in STAGE_ENTRIES)
        layers, in_use, fixed = [], [], []
        for memory, stage in zip(self.stages, self.plan.instances[0].stages, strict=True):
            layers.append(self._layer_bytes(stage) - self._in_place_bytes(stage))
            in_use.append(memory.page * stage.kv_pages)
            rounding = self.kv_bytes(memory, stage.kv_pages) - in_use[-1] if self.granule else 0
            fixed.append(others + memory.bytes_without_pages - layers[-1] + rounding)
        budget = self.ledger.budget
        if self.config.kv_pages is not None and self.config.max_kv_pages is None:
            budget = min(budget, max(map(sum, zip(fixed, layers, in_use, strict=True))))
        return Resources(
            budget=budget,
            fixed=tuple(fixed),
            layer_bytes=self.layer_bytes,
            page_bytes=tuple(memory.page for memory in self.stages),
            min_pages=self.min_kv_pages,
            max_pages=self.reserved_kv_pages,
            copy_rate=copy_rate,
            in_place=self.pinned.in_place_precisions,
            segments=() if self.granule else self.segments,
            shapes=self.buckets,
            page_size=self.config.page_size,
        )

    @property
    def min_kv_pages(self) -> int:
        """Smallest number of KV pages that a plan may have: the longest sequence's, and the null page."""
        return ceil_div(self.max_model_len, self.config.page_size) + 1

    def scheduler(self, instance: InstancePlan) -> tuple[Scheduler, PageTable]:
        """Return a new scheduler for an instance, and the page table it fills."""
        config, buckets = self.config, self.buckets
        width = max(ceil_div(self.max_model_len, config.page_size), *buckets.widths)
        table = PageTable(buckets.max_num_seqs, width)
        pages = PagePool(
            instance.stages[0].kv_pages,
            caching=config.prefix_caching,
            min_pages=self.min_kv_pages,
            max_pages=self.reserved_kv_pages,
        )
        limits = SchedulerLimits(buckets.max_num_seqs, buckets.max_tiles, buckets.tile, config.page_size)
        return Scheduler(limits, pages, table), table

    def plan_fields(self, instance: InstancePlan, version: int) -> Snapshot:
        """Return the fields of an instance's snapshots that follow from its plan; the other fields have defaults."""
        layers, stages = instance.layer_precisions, instance.stages
        sizes = self.stage_bytes(Plan(version, (instance,)))
        return Snapshot(
            kv_pages_total=stages[0].kv_pages - 1,
            plan_version=version,
            layers_by_precision={precision: layers.count(precision) for precision in set(layers)},
            weight_bytes=sum(weights * stage.tp for (weights, *_), stage in zip(sizes, stages, strict=True)),
            variant_bytes=sum(variants * stage.tp for (_, variants, _), stage in zip(sizes, stages, strict=True)),
            kv_bytes=sum(kv * stage.tp for (*_, kv), stage in zip(sizes, stages, strict=True)),
        )

    def _layer_bytes(self, stage: StagePlan) -> int:
        return sum(self.layer_bytes.get((block.block, block.precision), 0) for block in stage.blocks)

    def _in_place_bytes(self, stage: StagePlan) -> int:
        """Return the bytes of the layers that run on their pinned arrays."""
        in_place = (block for block in stage.blocks if block.precision in self.pinned.in_place_precisions)
        return sum(self.layer_bytes.get((block.block, block.precision), 0) for block in in_place)


def runtime_bytes(spec: EngineSpec, model: ModelConfig, instances: int = 1) -> int:
    """Estimate the bytes of host memory besides arrays: imported modules, and compiled programs of all instances."""
    config, shapes = spec.config, spec.buckets.all()
    kinds = {(model.is_sparse(layer), model.window(layer)) for layer in range(model.num_layers)}
    programs = PROGRAMS + config.pp * len(kinds) * len(spec.precisions)
    assignments = 1 if config.policy in POLICIES_WITHOUT_FORESIGHT else 1 + MAX_FORESEEN
    fused = 0 if config.fuse is False else assignments * model.num_layers * sum(not shape.tiles for shape in shapes)
    return RUNTIME + instances * (PROGRAM * programs * len(shapes) + FUSED_LAYER * fused)


def plan_memory(
    spec: EngineSpec, padded: ModelConfig, sizes: Sizes, budget: int, granule: int, *, runtime: int = 0
) -> MemoryPlan:
    """Decide how many KV pages an engine starts with, how many it may grow to, and what takes the remaining memory.

    `padded` is the model's configuration padded for tensor parallelism, and `sizes` are the bytes of its parts.
    `budget` is the memory of one device, of which `runtime` bytes are not arrays. `granule` is as in `MemoryPlan`.

    Raise `MemoryBudgetError` if the budget is too small, `ConfigError` if the configuration contradicts itself.
    """
    config, variants, plan = spec.config, spec.variants, spec.plan
    top = max(config.max_logprobs, 1)
    # On other platforms variants are pinned in the host's memory, which this budget does not count.
    on_cpu = spec.platform == "cpu"
    pinned = PinnedVariants(
        tuple(name for name in variants if name in BITS and on_cpu), in_place=on_cpu and config.dp == 1
    )
    stages = tuple(
        stage_memory(padded, stage, sizes, spec.buckets, top, variants, pinned) for stage in plan.instances[0].stages
    )
    layers = [block for block in plan.instances[0].blocks if is_layer(block.block)]
    layer_bytes = {(b.block, p): sizes.block(b.block, p) for b in layers for p in variants or (b.precision,)}
    bytes_taken = {
        (block, precision): 0 if precision in pinned.in_place_precisions else size
        for (block, precision), size in layer_bytes.items()
    }
    ledger = Ledger(budget)
    freeable = _freeable_bytes(plan, bytes_taken)
    pages, segments, max_len = _book_memory(spec, ledger, runtime, stages, freeable, granule)
    return MemoryPlan(
        config=config,
        plan=_with_pages(plan, pages),
        variants=variants,
        kv_dtype=spec.kv_dtype,
        segments=segments,
        max_model_len=max_len,
        buckets=spec.buckets,
        ledger=ledger,
        stages=stages,
        layer_bytes=layer_bytes,
        pinned=pinned,
        granule=granule,
    )


def _book_memory(
    spec: EngineSpec,
    ledger: Ledger,
    runtime: int,
    stages: tuple[StageMemory, ...],
    freeable: tuple[int, ...],
    granule: int,
) -> tuple[int, tuple[int, ...], int]:
    """Book the memory of the fullest stage in `ledger`; return (KV pages, pages of each segment, max_model_len).

    Pages and segments count the null page. Unless the user asks for more, there are at most as many pages as
    `max_num_seqs` sequences can use. `freeable` are the bytes that each stage's layers can free for pages. Elastic
    pools are booked with the pages in use, up to whole granules, and other pools with whole segments.
    """
    config, wanted_len = spec.config, spec.wanted_len
    page_size = config.page_size
    useful = spec.buckets.max_num_seqs * ceil_div(wanted_len, page_size) + 1
    rooms = [ledger.free - runtime - stage.bytes_without_pages for stage in stages]
    fullest = stages[min(range(len(stages)), key=lambda index: rooms[index] / stages[index].page)]
    min_pages = 2 if config.max_model_len is None else ceil_div(config.max_model_len, page_size) + 1
    _book_fixed_entries(ledger, runtime, fullest, min_pages)
    pages, reserved = _pages_and_max_pages(config, min(ledger.free // fullest.page, useful))
    if config.max_kv_pages is None and config.policy != STATIC:
        more = min(extra // stage.page for stage, extra in zip(stages, freeable, strict=True))
        reserved = max(reserved, min(pages + more, useful))
    if granule:
        segments: tuple[int, ...] = (reserved,)
        if config.kv_pages is None and _kv_bytes(fullest, pages, segments, granule) > ledger.free:
            # Each pool may take up to one granule more than its pages.
            pages = max(min_pages, (ledger.free - fullest.pools * granule) // fullest.page)
    else:
        fitting = min((room + extra) // stage.page for stage, room, extra in zip(stages, rooms, freeable, strict=True))
        segments = segments_for(pages, max(pages, min(reserved, fitting)))
    ledger.reserve("kv", _kv_bytes(fullest, pages, segments, granule))
    if sum(segments) * fullest.page > MAX_POOL_BYTES:
        raise ConfigError(
            f"max_kv_pages is {config.max_kv_pages}: it must be at most {MAX_POOL_BYTES // fullest.page - 1}, because "
            "a process cannot address larger pools"
        )
    max_len = min(wanted_len, (pages - 1) * page_size)
    if config.max_model_len is not None and max_len < wanted_len:
        raise ConfigError(
            f"max_model_len is {wanted_len}: it must be at most {max_len}, the tokens in {pages - 1} KV pages of "
            f"{page_size} tokens (kv_pages)"
        )
    if max_len < wanted_len:
        log.warning("max_model_len is lowered from %d to the %d tokens that the memory holds", wanted_len, max_len)
    return pages, segments, max_len


def _book_fixed_entries(ledger: Ledger, runtime: int, stage: StageMemory, min_pages: int) -> None:
    """Book everything except the KV pages. Raise `MemoryBudgetError` unless `min_pages` KV pages fit besides."""
    entries = {
        "runtime": runtime,
        "weights": stage.weights,
        "variants": stage.variants,
        "workspace": stage.workspace,
        "exchange": stage.swap_buffer,
    }
    entries = {name: size for name, size in entries.items() if size}
    _check_room(ledger, entries | {"KV pages": min_pages * stage.page})
    for name, size in entries.items():
        ledger.reserve(name, size)


def _check_room(ledger: Ledger, needs: Mapping[str, int]) -> None:
    if sum(needs.values()) > ledger.free:
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in (ledger.entries | dict(needs)).items())
        raise MemoryBudgetError(
            f"the memory budget is {ledger.budget / 1e9:.3f} GB per device: at least "
            f"{(ledger.used + sum(needs.values())) / 1e9:.3f} GB are needed: {parts} "
            "(memory_gb, max_model_len, max_num_seqs)"
        )


def _kv_bytes(memory: StageMemory, pages: int, segments: tuple[int, ...], granule: int) -> int:
    if not granule:
        return pages_covered(segments, pages) * memory.page
    return min(pages * memory.page + memory.pools * granule, sum(segments) * memory.page)


def _freeable_bytes(plan: Plan, sizes: Mapping[tuple[str, str], int]) -> tuple[int, ...]:
    """Return for each stage the bytes per device that its layers free if all change to their smallest precision."""
    smallest: dict[str, int] = {}
    for (block, _), size in sizes.items():
        smallest[block] = min(size, smallest.get(block, size))
    return tuple(
        sum(sizes[b.block, b.precision] - smallest[b.block] for b in stage.blocks if b.block in smallest)
        for stage in plan.instances[0].stages
    )


def _pages_and_max_pages(config: EngineConfig, fitting: int) -> tuple[int, int]:
    """Return (KV pages at the start, KV pages to have room for), both with the null page; `fitting` fit the budget."""
    pages = fitting if config.kv_pages is None else config.kv_pages + 1
    if config.max_kv_pages is None:
        return pages, pages
    if config.kv_pages is not None and config.max_kv_pages < config.kv_pages:
        raise ConfigError(f"max_kv_pages is {config.max_kv_pages}: it must be at least kv_pages ({config.kv_pages})")
    reserved = config.max_kv_pages + 1
    return min(pages, reserved), reserved


def _with_pages(plan: Plan, pages: int) -> Plan:
    instances = tuple(
        replace(instance, stages=tuple(replace(stage, kv_pages=pages) for stage in instance.stages))
        for instance in plan.instances
    )
    return replace(plan, instances=instances)
