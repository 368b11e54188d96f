"""The one place where the parts are wired together: from an `EngineConfig` to engines that are ready to serve."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax import Array

from jaxserve.bundled import bundled_model_path
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.control import InstancePlan, Ledger, Plan, StagePlan, static_plan
from jaxserve.core.clock import Clock, SystemClock
from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.errors import CheckpointError, ConfigError, MemoryBudgetError
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.executor.blocks import BlockBuilder, Row
from jaxserve.executor.buckets import Buckets
from jaxserve.executor.compilation import CompileCounter, use_persistent_cache
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.fused import FusedTier
from jaxserve.executor.memory import StageMemory, stage_memory
from jaxserve.executor.sampling import DeviceSampler
from jaxserve.hardware import device_memory, host_memory
from jaxserve.kernels import kv_pool
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.parallel.padding import physical_config
from jaxserve.parallel.placement import POOL_AXES, Placement
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import EngineMetrics, Snapshot

log = logging.getLogger(__name__)

MEMORY_FRACTION = {"cpu": 0.5, "gpu": 0.9, "tpu": 0.9}  # of what is free on the host, or of the device's memory
PLATFORM_DEFAULTS = {  # sequences at once, prefill tokens of a step, smallest number of rows of a product
    "cpu": (32, 512, 4),  # products of fewer than 4 rows are ten times slower on CPU
    "gpu": (256, 2048, 1),
    "tpu": (256, 2048, 8),
}
TILE = 64  # tokens of a prefill tile


@dataclass(frozen=True)
class Resolved:
    """Everything that follows from a configuration, the checkpoint and the machine, before any memory is taken."""

    config: EngineConfig
    checkpoint: Checkpoint
    physical: ModelConfig
    plan: Plan
    buckets: Buckets
    ledger: Ledger
    info: ModelInfo
    stages: tuple[StageMemory, ...]
    devices: tuple[jax.Device, ...]


@dataclass(frozen=True)
class Built:
    """A loaded engine: what the synchronous and the asynchronous front have in common."""

    instances: tuple[StepLoop, ...]
    info: ModelInfo
    tokenizer: Tokenizer | None
    metrics: EngineMetrics
    clock: Clock
    close: Callable[[], None]
    resolved: Resolved
    compilations: CompileCounter


def build_engine(config: EngineConfig) -> SyncEngine:
    """An engine that the caller steps. Raises `ConfigError`, `CheckpointError` or `MemoryBudgetError`."""
    built = build(config)
    return SyncEngine(built.instances, built.info, built.tokenizer, built.clock, on_close=built.close)


def build_async_engine(config: EngineConfig) -> AsyncEngine:
    """An engine with threads of its own, for servers. Raises as `build_engine`."""
    built = build(config)
    return AsyncEngine(built.instances, built.info, built.tokenizer, built.metrics, built.clock, on_close=built.close)


def build(config: EngineConfig) -> Built:
    """Resolves, loads, places and warms."""
    use_persistent_cache(config.compile_cache)
    resolved = resolve(config)
    tokenizer = _load_tokenizer(config, resolved.checkpoint)
    metrics = EngineMetrics(resolved.info.name)
    compilations = CompileCounter(metrics.compiled)
    clock = SystemClock()
    instances, executors = [], []
    for number, instance in enumerate(resolved.plan.instances):
        executor, scheduler = _build_instance(resolved, instance, compilations)
        executors.append(executor)
        core = EngineCore(
            scheduler,
            resolved.info,
            tokenizer,
            metrics,
            eos_token_ids=resolved.physical.eos_token_ids,
            salt=resolved.physical.dtype,
            seed=config.seed + number,
            static=_static_snapshot(resolved),
        )
        if config.warmup:
            executor.warm()
        instances.append(StepLoop(core, executor, clock, overlap=config.overlap))
    metrics.set_snapshot(instances[0].core.snapshot)

    def close() -> None:
        compilations.close()
        for executor in executors:
            executor.close()

    return Built(tuple(instances), resolved.info, tokenizer, metrics, clock, close, resolved, compilations)


# -- from a configuration to numbers


def resolve(config: EngineConfig) -> Resolved:
    """Decides everything that has to be decided; loads only the checkpoint's configuration."""
    path = Path(config.model) if config.model is not None else bundled_model_path()
    checkpoint = open_checkpoint(path, load_format=config.load_format, dtype=config.dtype)
    devices = tuple(jax.devices())
    platform = devices[0].platform
    if platform not in PLATFORM_DEFAULTS:
        raise ConfigError(f"platform {platform!r} is not supported; supported: {', '.join(PLATFORM_DEFAULTS)}")
    plan = static_plan(
        checkpoint.config.num_layers,
        precision=checkpoint.config.dtype,
        kv_pages=0,
        tp=config.tp,
        pp=config.pp,
        dp=config.dp,
        devices=len(devices),
    )
    physical = physical_config(checkpoint.config, config.tp)
    wanted_len = min(config.max_model_len or physical.max_position, physical.max_position)
    if config.max_model_len is not None and config.max_model_len > physical.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model's limit is {physical.max_position} positions"
        )
    seqs, prefill, min_rows = PLATFORM_DEFAULTS[platform]
    seqs = config.max_num_seqs or seqs
    if config.max_num_batched_tokens is not None:
        prefill = config.max_num_batched_tokens - seqs
    if prefill < TILE:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, it must be at least max_num_seqs + {TILE} = "
            f"{seqs + TILE}"
        )
    width = -(-wanted_len // config.page_size)
    widths = (width,) if platform == "cpu" else _width_buckets(width)
    buckets = Buckets(seqs, prefill // TILE, TILE, min_rows, widths)
    top = max(config.max_logprobs, 1)
    stages = tuple(stage_memory(physical, s, buckets, config.page_size, top) for s in plan.instances[0].stages)
    ledger = Ledger(_budget(config, devices, len(plan.instances)))
    pages, max_len = _kv_pages(config, wanted_len, seqs, stages, ledger)
    plan = _with_pages(plan, pages)
    return Resolved(
        config, checkpoint, physical, plan, buckets, ledger, _info(config, path, physical, max_len), stages, devices
    )


def _width_buckets(width: int) -> tuple[int, ...]:
    """Page-table widths on platforms whose attention reads the whole table: 64 pages, then times 4."""
    widths, size = [], 64
    while size < width:
        widths.append(size)
        size *= 4
    return (*widths, width)


def _budget(config: EngineConfig, devices: tuple[jax.Device, ...], instances: int) -> int:
    """Bytes of one device of one instance. Virtual CPU devices share the host's memory."""
    platform = devices[0].platform
    used = config.tp * config.pp * instances
    if config.memory_gb is not None:
        return int(config.memory_gb * 1e9) // (used if platform == "cpu" else 1)
    memory = device_memory(devices[0]) if platform != "cpu" else None
    if memory is None:
        return int(host_memory() * MEMORY_FRACTION["cpu"]) // used
    return int(memory * MEMORY_FRACTION[platform])


def _kv_pages(
    config: EngineConfig, wanted_len: int, seqs: int, stages: tuple[StageMemory, ...], ledger: Ledger
) -> tuple[int, int]:
    """Pages of the KV pools (the null page included) and the longest sequence they hold; fills the ledger.

    The ledger is that of the fullest device: the one whose stage leaves room for the fewest pages.
    """
    fullest = min(stages, key=lambda s: (ledger.budget - s.weights - s.workspace) / s.page)
    size = config.page_size
    least = 2 if config.max_model_len is None else -(-config.max_model_len // size) + 1
    needed = fullest.weights + fullest.workspace + least * fullest.page
    if needed > ledger.budget:
        raise MemoryBudgetError(
            f"the memory budget is {ledger.budget / 1e9:.3f} GB per device, at least {needed / 1e9:.3f} GB are needed: "
            f"weights {fullest.weights / 1e9:.3f}, workspace {fullest.workspace / 1e9:.3f}, KV pages "
            f"{least * fullest.page / 1e9:.3f} (memory_gb, max_model_len, max_num_seqs)"
        )
    ledger.reserve("weights", fullest.weights)
    ledger.reserve("workspace", fullest.workspace)
    fitting = ledger.free // fullest.page
    useful = seqs * -(-wanted_len // size) + 1
    pages = min(fitting, useful) if config.kv_pages is None else config.kv_pages + 1
    ledger.reserve("kv", pages * fullest.page)
    max_len = min(wanted_len, (pages - 1) * size)
    if config.max_model_len is not None and max_len < config.max_model_len:
        raise ConfigError(
            f"{pages - 1} KV pages of {size} tokens hold {max_len} tokens, max_model_len is {config.max_model_len}"
        )
    if max_len < wanted_len:
        log.warning(
            "max_model_len is lowered from %d to the %d tokens that the memory holds", wanted_len, max_len
        )
    return pages, max_len


def _with_pages(plan: Plan, pages: int) -> Plan:
    def with_stage(stage: StagePlan) -> StagePlan:
        return replace(stage, kv_pages=pages)

    instances = tuple(InstancePlan(tuple(with_stage(s) for s in i.stages)) for i in plan.instances)
    return replace(plan, instances=instances)


def _info(config: EngineConfig, path: Path, model: ModelConfig, max_len: int) -> ModelInfo:
    return ModelInfo(
        name=path.resolve().name,
        max_model_len=max_len,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        created=int(time.time()),
        max_n=config.max_n,
        max_logprobs=min(config.max_logprobs, model.vocab_size),
        max_stop_strings=config.max_stop_strings,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )


def _static_snapshot(resolved: Resolved) -> Snapshot:
    instance = resolved.plan.instances[0]
    layers = [b.precision for b in instance.blocks if b.block.startswith("layers.")]
    pages = instance.stages[0].kv_pages
    copies = len(resolved.plan.instances)
    return Snapshot(
        kv_pages_total=pages - 1,
        plan_version=resolved.plan.version,
        layers_by_precision={p: layers.count(p) for p in set(layers)},
        weight_bytes=copies * sum(m.weights * s.tp for m, s in zip(resolved.stages, instance.stages, strict=True)),
        kv_bytes=copies * pages * sum(m.page * s.tp for m, s in zip(resolved.stages, instance.stages, strict=True)),
    )


# -- from numbers to arrays


def _build_instance(
    resolved: Resolved, instance: InstancePlan, compilations: CompileCounter
) -> tuple[BlockExecutor, Scheduler]:
    config, buckets = resolved.config, resolved.buckets
    builder = BlockBuilder(resolved.physical)
    rows: list[Row] = []
    pools: list[Array] = []
    for stage in instance.stages:
        placement = Placement(tuple(resolved.devices[i] for i in stage.devices))
        for block in stage.blocks:
            tensors = resolved.checkpoint.block(block.block, resolved.physical)
            if block.block == "head" and resolved.physical.tie_embeddings and rows[0].placement == placement:
                tensors |= {"weight": rows[0].leaves[0]}
            rows.append(builder.build(block.block, tensors, placement, block.precision))
            if block.block.startswith("layers."):
                pools.append(_pool(resolved, stage, placement))
    width = -(-resolved.info.max_model_len // config.page_size)
    table = PageTable(buckets.max_num_seqs, max(width, max(buckets.widths)))
    pages = PagePool(instance.stages[0].kv_pages, caching=config.prefix_caching)
    limits = SchedulerLimits(buckets.max_num_seqs, buckets.max_tiles, buckets.tile, config.page_size)
    sampler = DeviceSampler(
        rows[-1].placement,
        slots=buckets.max_num_seqs,
        vocab=resolved.physical.vocab_rows,
        max_len=resolved.info.max_model_len,
        top_logprobs=max(resolved.info.max_logprobs, 1),
    )
    fuse = config.fuse if config.fuse is not None else resolved.devices[0].platform != "cpu"
    fused = FusedTier(compilations) if fuse else None
    executor = BlockExecutor(rows, pools, builder, sampler, buckets, table, config.page_size, fused)
    return executor, Scheduler(limits, pages, table)


def _pool(resolved: Resolved, stage: StagePlan, placement: Placement) -> Array:
    model = resolved.physical
    sharding = placement.sharding(POOL_AXES)
    return kv_pool(stage.kv_pages, model.num_kv_heads, resolved.config.page_size, model.head_dim, model.dtype, sharding)


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's tokenizer; None where the model's folder has none: prompts are then token ids."""
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer)
    try:
        return Tokenizer.load(checkpoint.path)
    except CheckpointError as error:
        log.warning("no tokenizer, prompts must be token ids: %s", error)
        return None
