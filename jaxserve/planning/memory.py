"""Division of a device's memory into weights, workspace, KV pages and the rest.

Imports no JAX, so that the simulator divides the memory of simulated devices by the same code.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from jaxserve.control.ledger import DeviceLedgers, Ledger
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policy import MAX_FORESEEN
from jaxserve.control.resources import Resources, stages_by_device
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.core.kv_layout import pages_covered, segments_for
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import BITS
from jaxserve.core.step_shapes import Buckets
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.planning.spec import STATIC, EngineSpec
from jaxserve.planning.workspace import DegreeSizes, ModelSizes, PinnedVariants
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import Snapshot

log = logging.getLogger(__name__)

# Host memory of a server process at its peak, measured on Linux with jax 0.10 and two processors by
# bench/process_memory.py (2026-11-27). These are first starts, which compile; the constant RUNTIME is that of an idle
# machine, where more is compiled at once than on a busy one (37 MB more). Later starts load what was compiled and
# need 40 to 75 MB less with native kernels. Where XLA multiplies, the peak is that of the compiler during the start.
RUNTIME = 355_000_000  # bytes: interpreter, JAX, server and compiler
PROGRAM = 700_000  # bytes of the programs of one kind of block for one step shape
FUSED_LAYER = 100_000  # bytes of each layer in a program that runs a whole step
XLA_FUSED_LAYER = 3_000_000  # the same where XLA multiplies
XLA_COMPILER = 400_000_000  # bytes that compiling products takes for a time
VARIANTS = 50_000_000  # bytes for making and warming variants of layers
XLA_SAMPLER = 6_100_000  # bytes for one step shape where XLA samples: sorts are large programs
PROGRAMS = 3  # programs per step shape besides those of the layers
POLICIES_WITHOUT_FORESIGHT = (STATIC, "manual")

# Share of the memory for KV pages that the swap buffer may take. Larger batches of layers wait for fewer steps: on a
# large device 2 % hold 10 to 20 layers of an 8B model, and on a small one a single layer is more than that.
SWAP_SHARE = 0.02

MAX_POOL_BYTES = 2**46  # half of what a process can address

# Copies of a change of the plan while steps go on. On CPU they need the bandwidth and the cores of the steps and are
# paced to this rate; elsewhere it is only the estimate, from below, of a link that no step needs.
COPY_RATES = {"cpu": 0.25e9, "gpu": 8e9, "tpu": 8e9}  # bytes/s
COPY_SHARES = {"cpu": 0.05, "gpu": 1.0, "tpu": 1.0}  # of a core, for the thread that copies


def copy_pace(platform: str) -> float:
    """Return the rate (bytes/s) to which a platform's copies are held while steps go on; infinity if they are not."""
    return COPY_RATES[platform] if platform == "cpu" else inf


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of everything in an engine that takes memory."""

    config: EngineConfig
    plan: Plan
    variants: tuple[str, ...]  # precisions that any layer may change to while serving; () if layers never change
    kv_dtype: str
    segments: tuple[int, ...]  # pages of each segment that KV pools may grow to
    max_model_len: int  # tokens
    buckets: Buckets
    ledgers: DeviceLedgers
    limits: Resources  # of plans on these devices
    sizes: ModelSizes

    @property
    def ledger(self) -> Ledger:
        """The ledger of the fullest device."""
        return self.ledgers.fullest

    @property
    def reserved_kv_pages(self) -> int:
        """Largest number of KV pages that the pools can grow to, the null page included."""
        return sum(self.segments)

    @property
    def granule(self) -> int:
        """Bytes by which an elastic pool grows; 0: pools take whole segments."""
        return self.limits.granule

    @property
    def pinned(self) -> PinnedVariants:
        """Variants that are held in the devices' own memory."""
        return self.sizes.pinned

    @property
    def layer_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes on each device of every layer at the start, by (layer, precision that it may have)."""
        return {
            (block.block, precision): self.sizes.block(block.block, precision)
            for block in self.plan.instances[0].blocks
            if is_layer(block.block)
            for precision in self.variants or (block.precision,)
        }

    def device_entries(self, instance: InstancePlan) -> dict[int, dict[str, int]]:
        """Return the ledgers' entries of an instance's plan, by device."""
        return self.limits.device_entries(instance)

    def resources(self, copy_rate: float) -> Resources:
        """Return the limits of plans, with copies estimated at `copy_rate` bytes/s.

        If the user set `kv_pages` without `max_kv_pages`, pages grow only by what smaller weights free.
        """
        limits = replace(self.limits, copy_rate=copy_rate)
        if self.config.kv_pages is None or self.config.max_kv_pages is not None:
            return limits
        return replace(limits, budget=max(limits.device_bytes(*self.plan.instances).values()))

    @property
    def min_kv_pages(self) -> int:
        """Smallest number of KV pages that a plan may have: the longest sequence's, and the null page."""
        return self.limits.min_pages

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
        scheduler = Scheduler(limits, pages, table)
        scheduler.limit_sequences(instance.max_num_seqs)
        return scheduler, table

    def plan_fields(self, instance: InstancePlan, version: int) -> Snapshot:
        """Return the fields of an instance's snapshots that follow from its plan; the other fields have defaults."""
        layers = instance.layer_precisions
        sizes: Counter[str] = Counter()
        for entries in self.device_entries(instance).values():
            sizes.update(entries)
        return Snapshot(
            kv_pages_total=instance.kv_pages - 1,
            plan_version=version,
            layers_by_precision={precision: layers.count(precision) for precision in set(layers)},
            weight_bytes=sizes["weights"],
            variant_bytes=sizes["variants"],
            kv_bytes=sizes["kv"],
        )


def runtime_bytes(spec: EngineSpec, model: ModelConfig, instances: int = 1) -> int:
    """Estimate the bytes of host memory besides arrays: imported modules, and compiled programs of all instances."""
    config, shapes = spec.config, spec.buckets.all()
    kinds = {(model.is_sparse(layer), model.window(layer)) for layer in range(model.num_layers)}
    programs = PROGRAMS + config.pp * len(kinds) * len(spec.precisions)
    assignments = 1 if config.policy in POLICIES_WITHOUT_FORESIGHT else 1 + MAX_FORESEEN
    fused = 0 if config.fuse is False else assignments * model.num_layers * sum(not shape.tiles for shape in shapes)
    xla = config.kernel_backend == "xla"
    by_shape = PROGRAM * programs + (XLA_SAMPLER if xla or config.tp > 1 else 0)
    by_instance = by_shape * len(shapes) + (XLA_FUSED_LAYER if xla else FUSED_LAYER) * fused
    variants = VARIANTS if spec.variants else 0
    return RUNTIME + variants + (XLA_COMPILER if xla else 0) + instances * by_instance


def plan_memory(
    spec: EngineSpec, of_degree: Callable[[int], DegreeSizes], budget: int, granule: int, *, runtime: int = 0
) -> MemoryPlan:
    """Decide how many KV pages an engine starts with, how many it may grow to, and what takes the remaining memory.

    `of_degree(tp)` returns the bytes of the model's parts on each of `tp` devices. `budget` is the memory of one
    device, of which `runtime` bytes are not arrays. `granule` is as in `MemoryPlan`.

    Raise `MemoryBudgetError` if the budget is too small, `ConfigError` if the configuration contradicts itself.
    """
    config = spec.config
    # On other platforms variants are held in the host's memory, which this budget does not count.
    on_cpu = spec.platform == "cpu"
    pinned = PinnedVariants(tuple(name for name in spec.variants if name in BITS and on_cpu), instances=config.dp)
    layers = {
        block.block: spec.variants or (block.precision,)
        for block in spec.plan.instances[0].blocks
        if is_layer(block.block)
    }
    sizes_with = partial(ModelSizes, of_degree, config.tp, layers, spec.buckets, max(config.max_logprobs, 1), pinned)
    sizes = sizes_with()
    limits = Resources(
        budget, sizes, min_pages=0, max_pages=0, copy_rate=COPY_RATES[spec.platform], runtime=runtime, granule=granule
    )
    rooms = _rooms(spec.plan, limits)
    if config.kv_pages is None and (swap_room := int(SWAP_SHARE * min(room.free for room in rooms))) > 0:
        sizes = sizes_with(swap_room)
        limits = replace(limits, sizes=sizes)
        rooms = _rooms(spec.plan, limits)
    pages, segments = _pages_and_segments(spec, rooms, granule)
    max_len = _max_model_len(spec, pages)
    limits = replace(
        limits,
        min_pages=ceil_div(max_len, config.page_size) + 1,
        max_pages=sum(segments),
        segments=() if granule else segments,
        start_pages=pages,
        shapes=spec.buckets,
        page_size=config.page_size,
    )
    plan = _with_pages(spec.plan, pages)
    return MemoryPlan(
        config=config,
        plan=plan,
        variants=spec.variants,
        kv_dtype=spec.kv_dtype,
        segments=segments,
        max_model_len=max_len,
        buckets=spec.buckets,
        ledgers=_ledgers(plan, limits),
        limits=limits,
        sizes=sizes,
    )


def _ledgers(plan: Plan, limits: Resources) -> DeviceLedgers:
    """Return the ledgers of a plan's devices, with the entries of its instances."""
    runtime = {"runtime": limits.runtime} if limits.runtime else {}
    ledgers = DeviceLedgers(
        {device: Ledger(limits.budget, runtime) for device in limits.device_entries(*plan.instances)}
    )
    for instance in plan.instances:
        ledgers.update(instance.name, limits.device_entries(instance))
    return ledgers


@dataclass(frozen=True)
class _Room:
    """The room that the parts of a plan without its KV pages leave of one device."""

    device: int
    budget: int
    entries: Mapping[str, int]  # bytes of the parts by name
    freeable: int  # bytes that layers can free for pages by changing to their smallest precision
    page: int  # bytes of one KV page in the pools of all layers
    pools: int

    @property
    def free(self) -> int:
        """Bytes that are left for KV pages."""
        return self.budget - sum(self.entries.values())

    def pool_bytes(self, pages: int, segments: tuple[int, ...], granule: int) -> int:
        """Return the bytes that the pools take while `pages` are in use."""
        if not granule:
            return pages_covered(segments, pages) * self.page
        return min(pages * self.page + self.pools * granule, sum(segments) * self.page)


def _rooms(plan: Plan, limits: Resources) -> list[_Room]:
    """Return the room on each device of a plan without KV pages."""
    bytes_at_smallest = limits.device_bytes(*map(limits.smallest, plan.instances))
    entries = limits.device_entries(*plan.instances)
    runtime = {"runtime": limits.runtime} if limits.runtime else {}
    rooms = []
    for device, stages in stages_by_device(plan.instances).items():
        taken = runtime | entries[device]
        rooms.append(
            _Room(
                device,
                limits.budget,
                taken,
                freeable=sum(taken.values()) - bytes_at_smallest[device],
                page=sum(map(limits.page_bytes, stages)),
                pools=sum(is_layer(block.block) for stage in stages for block in stage.blocks),
            )
        )
    return rooms


def _pages_and_segments(spec: EngineSpec, rooms: Sequence[_Room], granule: int) -> tuple[int, tuple[int, ...]]:
    """Return the KV pages at the start and the pages of each segment that pools may grow to, with the null page.

    Unless the user asks for more, there are at most as many pages as `max_num_seqs` sequences can use. All devices have
    the same pages, as many as the fullest one has room for. Elastic pools take the pages in use, up to whole granules,
    and other pools take whole segments.
    """
    config = spec.config
    useful = spec.buckets.max_num_seqs * ceil_div(spec.wanted_len, config.page_size) + 1
    min_pages = 2 if config.max_model_len is None else ceil_div(config.max_model_len, config.page_size) + 1
    for room in rooms:
        _check_room(room, min_pages)
    pages, reserved = _pages_and_max_pages(config, min(useful, *(room.free // room.page for room in rooms)))
    if config.max_kv_pages is None and config.policy != STATIC:
        reserved = max(reserved, min(useful, _most_pages(config, rooms, pages)))
    if granule:
        segments: tuple[int, ...] = (reserved,)
        if config.kv_pages is None and any(room.pool_bytes(pages, segments, granule) > room.free for room in rooms):
            # Each pool may take up to one granule more than its pages.
            pages = max(min_pages, min((room.free - room.pools * granule) // room.page for room in rooms))
    else:
        fitting = min((room.free + room.freeable) // room.page for room in rooms)
        segments = segments_for(pages, max(pages, min(reserved, fitting)))
    for room in rooms:
        _check_pools(room, room.pool_bytes(pages, segments, granule))
    page = max(room.page for room in rooms)
    if sum(segments) * page > MAX_POOL_BYTES:
        raise ConfigError(
            f"max_kv_pages is {config.max_kv_pages}: it must be at most {MAX_POOL_BYTES // page - 1}, because a "
            "process cannot address larger pools"
        )
    return pages, segments


def _most_pages(config: EngineConfig, rooms: Sequence[_Room], pages: int) -> int:
    """Return the KV pages that fit next to the smallest layers, for a policy that starts with `pages`.

    If the user chose the pages at the start, only what the layers free becomes pages.
    """
    if config.kv_pages is not None:
        return pages + min(room.freeable // room.page for room in rooms)
    return min((room.free + room.freeable) // room.page for room in rooms)


def _max_model_len(spec: EngineSpec, pages: int) -> int:
    """Return the tokens of the longest sequence: what the user asks for, or what the KV pages hold if that is less.

    Raise `ConfigError` if the user gave a number and the pages hold less.
    """
    config, wanted_len = spec.config, spec.wanted_len
    max_len = min(wanted_len, (pages - 1) * config.page_size)
    if config.max_model_len is not None and max_len < wanted_len:
        raise ConfigError(
            f"max_model_len is {wanted_len}: it must be at most {max_len}, the tokens in {pages - 1} KV pages of "
            f"{config.page_size} tokens (kv_pages)"
        )
    if max_len < wanted_len:
        log.warning("max_model_len is lowered from %d to the %d tokens that the memory holds", wanted_len, max_len)
    return max_len


def _check_room(room: _Room, min_pages: int) -> None:
    needs = {**room.entries, "KV pages": min_pages * room.page}
    if (needed := sum(needs.values())) > room.budget:
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in needs.items())
        raise MemoryBudgetError(
            f"the memory budget is {room.budget / 1e9:.3f} GB per device: device {room.device} needs at least "
            f"{needed / 1e9:.3f} GB: {parts} (memory_gb, max_model_len, max_num_seqs)"
        )


def _check_pools(room: _Room, pool_bytes: int) -> None:
    if pool_bytes > room.free:
        raise MemoryBudgetError(
            f"kv needs {pool_bytes / 1e9:.3f} GB on device {room.device}, {room.free / 1e9:.3f} GB of the budget of "
            f"{room.budget / 1e9:.3f} GB are left; at least {(room.budget - room.free + pool_bytes) / 1e9:.3f} GB are "
            "needed (memory_gb)"
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
