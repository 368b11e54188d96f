"""MemoryPlan: the pages and bytes that follow from an outline and the memory of a device.

Imports no JAX: on hardware that is simulated the same follows.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxserve.control.ledger import Ledger
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

# Bytes on the host, measured on Linux with jax 0.10 (2026-11-27) at first starts, which compile; later ones load what
# was compiled, and need 250 MB less. RUNTIME is for interpreter, JAX and server, with a margin of some 60 MB; PROGRAM
# for a block's program for a step's shape; FUSED_LAYER for each layer in a program for a whole step. Beside layers a
# shape has PROGRAMS of its own; a policy has steps compiled for FORESEEN mixtures at most, beside the one at the start.
RUNTIME, PROGRAM, FUSED_LAYER = 420_000_000, 2_000_000, 500_000
PROGRAMS, FORESEEN = 3, 4
ADDRESSES = 2**46  # bytes that pools may have room for: half of what a process can address
UNFORESEEING = (STATIC, "manual")  # policies
STAGE_ENTRIES = ("weights", "variants", "kv", "workspace", "exchange")  # the ledger's entries that are a stage's
COPY_RATES = {"cpu": 0.25e9, "gpu": 8e9, "tpu": 8e9}  # bytes/s, for a change of the plan while steps go on
COPY_SHARES = {"cpu": 0.05, "gpu": 1.0, "tpu": 1.0}  # of a core, for the thread that copies: steps may need it


@dataclass(frozen=True)
class MemoryPlan:
    """A configuration with nothing left open that takes memory. The ledger is that of the fullest device."""

    config: EngineConfig
    plan: Plan
    variants: tuple[str, ...]  # precisions that any layer may change to while serving; () if none ever does
    kv_dtype: str  # of the KV pools
    segments: tuple[int, ...]  # pages of each one that KV pools may have; the plan says how many pages are in use
    max_model_len: int  # tokens of the longest sequence
    buckets: Buckets
    ledger: Ledger
    stages: tuple[StageMemory, ...]
    layer_bytes: Mapping[tuple[str, str], int]  # (layer, precision it may have) -> bytes on each device of its stage
    pinned: PinnedVariants
    granule: int  # bytes that an elastic pool takes at once; 0: pools take whole segments

    @property
    def reserved_kv_pages(self) -> int:
        """The most that there may ever be."""
        return sum(self.segments)

    def stage_bytes(self, plan: Plan) -> tuple[tuple[int, int, int], ...]:
        """Weights, variants that are kept beside them, and KV of every stage of a plan on each of its devices, instance
        by instance.
        """
        first = self.plan.instances[0].stages
        sizes = []
        for instance in plan.instances:
            for memory, stage, start in zip(self.stages, instance.stages, first, strict=True):
                weights = memory.weights + self._layers(stage) - self._layers(start)
                variants = memory.variants - self._in_place(stage) + self._in_place(start)
                sizes.append((weights, variants, self.kv_bytes(memory, stage.kv_pages)))
        return tuple(sizes)

    def kv_bytes(self, memory: StageMemory, pages: int) -> int:
        """What the KV pools of a stage take on each device while so many pages are in use."""
        return _kv_bytes(memory, pages, self.segments, self.granule)

    def ledger_entries(self, plan: Plan) -> dict[str, int]:
        """The ledger's entries that follow from a plan: those of its fullest stage."""
        memories = self.stages * len(plan.instances)
        stages = (
            (*sizes, memory.workspace, memory.swap_buffer)
            for memory, sizes in zip(memories, self.stage_bytes(plan), strict=True)
        )
        entries = dict(zip(STAGE_ENTRIES, max(stages, key=sum), strict=True))
        return {name: size for name, size in entries.items() if name in self.ledger.entries}

    def resources(self, copy_rate: float) -> Resources:
        """What plans may use. Where a number of pages was given alone, it grows by what weights free, and no more."""
        others = sum(size for name, size in self.ledger.entries.items() if name not in STAGE_ENTRIES)
        layers, in_use, fixed = [], [], []
        for memory, stage in zip(self.stages, self.plan.instances[0].stages, strict=True):
            layers.append(self._layers(stage) - self._in_place(stage))
            in_use.append(memory.page * stage.kv_pages)
            granules = self.kv_bytes(memory, stage.kv_pages) - in_use[-1] if self.granule else 0  # beyond the pages
            fixed.append(others + memory.beside_pages - layers[-1] + granules)
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
            kept=self.pinned.in_place_precisions,
            segments=() if self.granule else self.segments,
        )

    @property
    def min_kv_pages(self) -> int:
        """Those of the longest sequence, and the null page."""
        return ceil_div(self.max_model_len, self.config.page_size) + 1

    def scheduler(self, instance: InstancePlan) -> tuple[Scheduler, PageTable]:
        """The bookkeeping of an instance that has nothing to do yet."""
        config, buckets = self.config, self.buckets
        width = max(ceil_div(self.max_model_len, config.page_size), *buckets.widths)
        table = PageTable(buckets.max_num_seqs, width)
        pages = PagePool(
            instance.stages[0].kv_pages,
            caching=config.prefix_caching,
            least=self.min_kv_pages,
            most=self.reserved_kv_pages,
        )
        limits = SchedulerLimits(buckets.max_num_seqs, buckets.max_tiles, buckets.tile, config.page_size)
        return Scheduler(limits, pages, table), table

    def plan_fields(self, plan: Plan, number: int) -> Snapshot:
        """What a snapshot says of an instance that follows from the plan."""
        instance = plan.instances[number]
        layers, stages = instance.layer_precisions, instance.stages
        sizes = self.stage_bytes(replace(plan, instances=(instance,)))
        return Snapshot(
            kv_pages_total=stages[0].kv_pages - 1,
            plan_version=plan.version,
            layers_by_precision={precision: layers.count(precision) for precision in set(layers)},
            weight_bytes=sum(weights * stage.tp for (weights, *_), stage in zip(sizes, stages, strict=True)),
            variant_bytes=sum(variants * stage.tp for (_, variants, _), stage in zip(sizes, stages, strict=True)),
            kv_bytes=sum(kv * stage.tp for (*_, kv), stage in zip(sizes, stages, strict=True)),
        )

    def _layers(self, stage: StagePlan) -> int:
        return sum(self.layer_bytes.get((block.block, block.precision), 0) for block in stage.blocks)

    def _in_place(self, stage: StagePlan) -> int:
        """Of the layers' bytes, those that are used where they are kept."""
        used = (block for block in stage.blocks if block.precision in self.pinned.in_place_precisions)
        return sum(self.layer_bytes.get((block.block, block.precision), 0) for block in used)


def runtime_bytes(outline: EngineSpec, model: ModelConfig, instances: int = 1) -> int:
    """What a process takes on the host beside arrays: what it imports, and what is compiled for a model's instances."""
    config, shapes = outline.config, outline.buckets.all()
    kinds = {(model.is_sparse(layer), model.window(layer)) for layer in range(model.num_layers)}
    programs = PROGRAMS + config.pp * len(kinds) * len(outline.precisions)
    mixtures = 1 if config.policy in UNFORESEEING else 1 + FORESEEN
    fused = 0 if config.fuse is False else mixtures * model.num_layers * sum(not shape.tiles for shape in shapes)
    return RUNTIME + instances * (PROGRAM * programs * len(shapes) + FUSED_LAYER * fused)


def plan_memory(
    outline: EngineSpec, padded: ModelConfig, sizes: Sizes, budget: int, granule: int, *, runtime: int = 0
) -> MemoryPlan:
    """Decides how many pages there are. `sizes` are those of the `padded` configuration, on each device, as are
    `budget` and `runtime`, what of it is not arrays; `granule` as of `MemoryPlan`. Raises `ConfigError` or
    `MemoryBudgetError`.
    """
    config, variants, plan = outline.config, outline.variants, outline.plan
    top = max(config.max_logprobs, 1)
    on_host = outline.platform == "cpu"  # else they lie in memory of the host
    pinned = PinnedVariants(
        tuple(name for name in variants if name in BITS and on_host), in_place=on_host and config.dp == 1
    )
    stages = tuple(
        stage_memory(padded, stage, sizes, outline.buckets, top, variants, pinned) for stage in plan.instances[0].stages
    )
    layers = [block for block in plan.instances[0].blocks if is_layer(block.block)]
    layer_bytes = {(b.block, p): sizes.block(b.block, p) for b in layers for p in variants or (b.precision,)}
    taken = {each: 0 if each[1] in pinned.in_place_precisions else part for each, part in layer_bytes.items()}
    ledger = Ledger(budget)
    pages, segments, max_len = _fill(outline, ledger, runtime, stages, _spare(plan, taken), granule)
    return MemoryPlan(
        config=config,
        plan=_with_pages(plan, pages),
        variants=variants,
        kv_dtype=outline.kv_dtype,
        segments=segments,
        max_model_len=max_len,
        buckets=outline.buckets,
        ledger=ledger,
        stages=stages,
        layer_bytes=layer_bytes,
        pinned=pinned,
        granule=granule,
    )


def _fill(
    outline: EngineSpec,
    ledger: Ledger,
    runtime: int,
    stages: tuple[StageMemory, ...],
    spare: tuple[int, ...],
    granule: int,
) -> tuple[int, tuple[int, ...], int]:
    """Enters the runtime, and the stage that leaves room for the fewest pages; returns how many there are, the segments
    that pools may have, both with the null page, and the longest sequence they hold.

    No more pages are taken unasked than sequences can use. `spare`: what each stage's layers can give for pages. Bytes
    of elastic pools are those of the pages that may be in use, up to whole granules; of others, those of whole
    segments. Mutates `ledger`.
    """
    config, wanted_len = outline.config, outline.wanted_len
    size = config.page_size
    useful = outline.buckets.max_num_seqs * ceil_div(wanted_len, size) + 1
    rooms = [ledger.free - runtime - stage.beside_pages for stage in stages]
    fullest = stages[min(range(len(stages)), key=lambda number: rooms[number] / stages[number].page)]
    least = 2 if config.max_model_len is None else ceil_div(config.max_model_len, size) + 1
    parts = {
        "runtime": runtime,
        "weights": fullest.weights,
        "variants": fullest.variants,
        "workspace": fullest.workspace,
        "exchange": fullest.swap_buffer,
    }
    fixed = {name: part for name, part in parts.items() if part}
    _check_room(ledger, fixed | {"KV pages": least * fullest.page})
    for name, needed in fixed.items():
        ledger.reserve(name, needed)
    pages, reserved = _pages(config, min(ledger.free // fullest.page, useful))
    if config.max_kv_pages is None and config.policy != STATIC:
        more = min(extra // stage.page for stage, extra in zip(stages, spare, strict=True))
        reserved = max(reserved, min(pages + more, useful))
    if granule:
        segments: tuple[int, ...] = (reserved,)
        if config.kv_pages is None and _kv_bytes(fullest, pages, segments, granule) > ledger.free:
            pages = max(least, (ledger.free - fullest.pools * granule) // fullest.page)  # of pools with room for more
    else:  # no more than may ever fit
        most = min((room + extra) // stage.page for stage, room, extra in zip(stages, rooms, spare, strict=True))
        segments = segments_for(pages, max(pages, min(reserved, most)))
    ledger.reserve("kv", _kv_bytes(fullest, pages, segments, granule))
    if sum(segments) * fullest.page > ADDRESSES:
        raise ConfigError(f"max_kv_pages is {config.max_kv_pages}: no process has addresses for pools of so many")
    max_len = min(wanted_len, (pages - 1) * size)
    if config.max_model_len is not None and max_len < wanted_len:
        raise ConfigError(f"{pages - 1} KV pages of {size} tokens hold {max_len} tokens, max_model_len is {wanted_len}")
    if max_len < wanted_len:
        log.warning("max_model_len is lowered from %d to the %d tokens that the memory holds", wanted_len, max_len)
    return pages, segments, max_len


def _check_room(ledger: Ledger, needs: Mapping[str, int]) -> None:
    if sum(needs.values()) > ledger.free:
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in (ledger.entries | dict(needs)).items())
        raise MemoryBudgetError(
            f"the memory budget is {ledger.budget / 1e9:.3f} GB per device, at least "
            f"{(ledger.used + sum(needs.values())) / 1e9:.3f} GB are needed: {parts} "
            "(memory_gb, max_model_len, max_num_seqs)"
        )


def _kv_bytes(memory: StageMemory, pages: int, segments: tuple[int, ...], granule: int) -> int:
    if not granule:
        return pages_covered(segments, pages) * memory.page
    return min(pages * memory.page + memory.pools * granule, sum(segments) * memory.page)


def _spare(plan: Plan, sizes: Mapping[tuple[str, str], int]) -> tuple[int, ...]:
    """Bytes that each stage's layers can give on each device, from what they start with to the least they may have."""
    least: dict[str, int] = {}
    for (block, _), size in sizes.items():
        least[block] = min(size, least.get(block, size))
    return tuple(
        sum(sizes[b.block, b.precision] - least[b.block] for b in stage.blocks if b.block in least)
        for stage in plan.instances[0].stages
    )


def _pages(config: EngineConfig, fitting: int) -> tuple[int, int]:
    """Pages in use at the start, of `fitting` that would fit, and those to have room for; both with the null page."""
    pages = fitting if config.kv_pages is None else config.kv_pages + 1
    if config.max_kv_pages is None:
        return pages, pages
    if config.kv_pages is not None and config.max_kv_pages < config.kv_pages:
        raise ConfigError(f"max_kv_pages is {config.max_kv_pages}, it must be at least kv_pages, {config.kv_pages}")
    reserved = config.max_kv_pages + 1
    return min(pages, reserved), reserved


def _with_pages(plan: Plan, pages: int) -> Plan:
    instances = tuple(
        replace(instance, stages=tuple(replace(stage, kv_pages=pages) for stage in instance.stages))
        for instance in plan.instances
    )
    return replace(plan, instances=instances)
