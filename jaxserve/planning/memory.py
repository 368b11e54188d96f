"""Division of a device's memory into weights, workspace, KV pages and the rest.

Imports no JAX, so that the simulator divides the memory of simulated devices by the same code.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from jaxserve.control.ledger import DeviceLedgers, Ledger
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policy import MAX_FORESEEN
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.kv_layout import exchanged_pages
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import BITS
from jaxserve.core.step_shapes import Buckets
from jaxserve.kvcache import Lanes, PagePool, PageTable
from jaxserve.planning.chunk_costs import assumed_chunk_cost, given_chunk_cost
from jaxserve.planning.kv_pages import with_kv_pages, within_start
from jaxserve.planning.rooms import rooms_of
from jaxserve.planning.spec import MANUAL, EngineSpec, changes_layers, max_lanes
from jaxserve.planning.workspace import DegreeSizes, ModelSizes, PinnedVariants
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.scheduler.pipelined import PipelinedScheduler
from jaxserve.telemetry import Snapshot

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

# Share of the memory for KV pages that the swap buffer may take. Larger batches of layers wait for fewer steps: on a
# large device 1.9 % hold 9 to 18 layers of an 8B model. On a small one a single layer is more than that: there layers
# are freed before others take their place, while steps wait for a copy of some milliseconds.
SWAP_SHARE = 0.019

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
    max_model_len: int  # tokens that each instance holds at the start
    buckets: Buckets  # step shapes of an instance at the start
    ledgers: DeviceLedgers
    limits: Resources  # of plans on these devices
    sizes: ModelSizes
    chunk_cost: ChunkCost  # by which microbatches are formed, while step times are unknown unless the user gave it

    @property
    def ledger(self) -> Ledger:
        """The ledger of the fullest device."""
        return self.ledgers.fullest

    @property
    def reserved_kv_pages(self) -> int:
        """Largest number of KV pages that an instance of the start can grow to, the null page included."""
        return self.limits.max_pages

    # -- by degree of tensor parallelism

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees that instances may have while serving, that of the start first."""
        return self.config.degrees.all()

    def buckets_of(self, degree: int) -> Buckets:
        """Return the step shapes of an instance, which has the slots of all instances that it takes the place of."""
        return self.limits.limits_of(degree).shapes

    def max_len(self, degree: int) -> int:
        """Return the tokens of the longest sequence that an instance holds in its precisions at the start."""
        return self.limits.limits_of(degree).max_len

    def min_pages(self, degree: int) -> int:
        """Return the smallest number of KV pages of an instance: its longest sequence's, and the null page."""
        return self.limits.limits_of(degree).min_pages

    def max_pages(self, degree: int) -> int:
        """Return the largest number of KV pages of an instance, the null page included."""
        return self.limits.limits_of(degree).max_pages

    def segments(self, degree: int) -> tuple[int, ...]:
        """Return the pages of each segment that an instance's KV pools may grow to."""
        limits = self.limits.limits_of(degree)
        return limits.segments or (limits.room,)

    # -- bytes

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
        return within_start(self.config, self.plan.instances, replace(self.limits, copy_rate=copy_rate))

    def scheduler(self, instance: InstancePlan, pages: PagePool | None = None) -> tuple[Scheduler, PageTable]:
        """Return a new scheduler for an instance, and the page table it fills. Without `pages` all of them are free."""
        config, of_instance = self.config, self.limits.limits_of(instance.tp, instance.lanes)
        buckets = of_instance.shapes
        width = max(ceil_div(of_instance.max_len, config.page_size), *buckets.widths)
        table = PageTable(of_instance.slots, width, Lanes(self.segments(instance.tp), instance.lanes))
        pages = pages or PagePool(
            instance.stages[0].kv_pages,
            caching=config.prefix_caching,
            min_pages=of_instance.min_pages,
            max_pages=of_instance.max_pages,
        )
        limits = SchedulerLimits(
            of_instance.slots, buckets.max_tiles, buckets.tile, config.page_size, max_decodes=buckets.max_num_seqs
        )
        scheduler = self._scheduler_of(instance, limits, pages, table)
        scheduler.limit_sequences(instance.max_num_seqs)
        return scheduler, table

    def _scheduler_of(
        self, instance: InstancePlan, limits: SchedulerLimits, pages: PagePool, table: PageTable
    ) -> Scheduler:
        config, stages = self.config, len(instance.stages)
        if stages == 1 or not config.overlap:
            return Scheduler(limits, pages, table)
        return PipelinedScheduler(
            limits,
            pages,
            table,
            microbatches=stages,
            cost=self.chunk_cost,
            measured=config.microbatch_cost is None,
            by_tokens=config.microbatches == "tokens",
        )

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
    """Estimate the bytes of host memory besides arrays: imported modules, and compiled programs of all instances.

    Instances that others are merged to have programs of their own, and so have groups, of 2, 4 and 8 instances.
    """
    config, degrees = spec.config, spec.config.degrees
    xla = config.kernel_backend == "xla"
    programs = sum(
        ceil_div(instances, degrees.members(degree)) * _program_bytes(spec, model, degree) for degree in degrees.all()
    )
    kinds_of_groups = max_lanes(config, model.num_layers).bit_length() - 1
    programs += kinds_of_groups * instances * _program_bytes(spec, model, degrees.tp)
    return RUNTIME + (VARIANTS if spec.variants else 0) + (XLA_COMPILER if xla else 0) + programs


def _program_bytes(spec: EngineSpec, model: ModelConfig, degree: int) -> int:
    """Estimate the bytes of an instance's compiled programs."""
    config, shapes = spec.config, spec.buckets.times(spec.config.degrees.members(degree)).all()
    kinds = {(model.is_sparse(layer), model.window(layer)) for layer in range(model.num_layers)}
    programs = PROGRAMS + config.pp * len(kinds) * len(spec.precisions)
    foresees = changes_layers(config) and config.policy != MANUAL
    assignments = 1 + MAX_FORESEEN if foresees else 1
    fuses = config.warmup if config.fuse is None else config.fuse
    fused = assignments * model.num_layers * sum(not shape.tiles for shape in shapes) if fuses else 0
    xla = config.kernel_backend == "xla"
    by_shape = PROGRAM * programs + (XLA_SAMPLER if xla or degree > 1 else 0)
    return by_shape * len(shapes) + (XLA_FUSED_LAYER if xla else FUSED_LAYER) * fused


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
    held = tuple(name for name in spec.variants if name in BITS and spec.platform == "cpu")
    cuts = config.degrees.at_once(config.virtual_devices or config.tp * config.dp)
    pinned = PinnedVariants(held, instances=config.dp, cuts=cuts)
    blocks = {
        block.block: spec.variants if spec.variants and is_layer(block.block) else (block.precision,)
        for block in spec.plan.instances[0].blocks
    }
    top = max(config.max_logprobs, 1)
    lanes = max_lanes(config, sum(map(is_layer, blocks)))
    sized = partial(ModelSizes, of_degree, config.degrees, blocks, spec.buckets, top, pinned, lanes)
    sizes = sized()
    limits = Resources(
        budget,
        sizes,
        min_pages=0,
        max_pages=0,
        copy_rate=COPY_RATES[spec.platform],
        runtime=runtime,
        granule=granule,
        shapes=spec.buckets,
        page_size=config.page_size,
        devices=spec.devices,
        exchanged_pages=exchanged_pages(spec.platform),
    )
    free = min(room.free for room in rooms_of(spec.plan.instances, limits))
    if config.kv_pages is None and (swap_room := int(SWAP_SHARE * free)) > 0:
        sizes = sized(swap_room)
        limits = replace(limits, sizes=sizes)
    limits = with_kv_pages(spec, limits)
    plan = _with_pages(spec.plan, limits.start_pages)
    return MemoryPlan(
        config=config,
        plan=plan,
        variants=spec.variants,
        kv_dtype=spec.kv_dtype,
        max_model_len=limits.max_len,
        buckets=spec.buckets,
        ledgers=_ledgers(plan, limits),
        limits=limits,
        sizes=sizes,
        chunk_cost=given_chunk_cost(config) or assumed_chunk_cost(of_degree(config.tp).config, spec.platform),
    )


def _ledgers(plan: Plan, limits: Resources) -> DeviceLedgers:
    """Return the ledgers of all devices, with the entries of a plan's instances."""
    runtime = {"runtime": limits.runtime} if limits.runtime else {}
    used = limits.device_entries(*plan.instances)
    ledgers = DeviceLedgers(
        {device: Ledger(limits.budget, runtime) for device in used},
        {device: Ledger(limits.budget, runtime) for device in range(limits.devices) if device not in used},
    )
    for instance in plan.instances:
        ledgers.update(instance.name, limits.device_entries(instance))
    return ledgers


def _with_pages(plan: Plan, pages: int) -> Plan:
    instances = tuple(
        replace(instance, stages=tuple(replace(stage, kv_pages=pages) for stage in instance.stages))
        for instance in plan.instances
    )
    return replace(plan, instances=instances)
