"""The one place where the parts are wired together: from an `EngineConfig` to engines that are ready to serve."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import Array

from jaxserve.checkpoint import Checkpoint
from jaxserve.control import InstancePlan, StagePlan
from jaxserve.core.clock import Clock, SystemClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.precision import mixture_name
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.executor.blocks import BlockBuilder, Row
from jaxserve.executor.compilation import CompileCounter, use_persistent_cache
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.fused import FusedTier
from jaxserve.executor.sampling import DeviceSampler
from jaxserve.kernels import kv_pool
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.parallel.placement import POOL_AXES, Placement
from jaxserve.resolution import Resolved, resolve
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import EngineMetrics, Snapshot

log = logging.getLogger(__name__)


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
            eos_token_ids=(*resolved.physical.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())),
            salt=mixture_name(instance.layer_precisions),
            seed=config.seed + number,
            static=_static_snapshot(resolved, instance),
            number=number,
        )
        if config.warmup:
            executor.warm()
            _warm_variants(resolved, instance, executor)
        instances.append(StepLoop(core, executor, clock, overlap=config.overlap))

    def close() -> None:
        compilations.close()
        for executor in executors:
            executor.close()

    return Built(tuple(instances), resolved.info, tokenizer, metrics, clock, close, resolved, compilations)


def _static_snapshot(resolved: Resolved, instance: InstancePlan) -> Snapshot:
    """What a snapshot says of an instance that does not change from step to step."""
    layers = instance.layer_precisions
    pages = instance.stages[0].kv_pages
    stages = list(zip(resolved.stages, instance.stages, strict=True))
    return Snapshot(
        kv_pages_total=pages - 1,
        plan_version=resolved.plan.version,
        layers_by_precision={precision: layers.count(precision) for precision in set(layers)},
        weight_bytes=sum(memory.weights * stage.tp for memory, stage in stages),
        kv_bytes=pages * sum(memory.page * stage.tp for memory, stage in stages),
    )


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
            tensors = resolved.checkpoint.variant(block.block, block.precision, resolved.physical)
            if block.block == "head" and resolved.physical.tie_embeddings and rows[0].placement == placement:
                tensors |= {"weight": jax.tree.unflatten(jax.tree.structure(tensors["weight"]), rows[0].leaves)}
            rows.append(builder.build(block.block, tensors, placement, block.precision))
            if block.block.startswith("layers."):
                pools.append(_pool(resolved, stage, placement))
    width = -(-resolved.info.max_model_len // config.page_size)
    table = PageTable(buckets.max_num_seqs, max(width, max(buckets.widths)))
    least = -(-resolved.info.max_model_len // config.page_size) + 1
    pages = PagePool(
        instance.stages[0].kv_pages, caching=config.prefix_caching, least=least, most=resolved.reserved_kv_pages
    )
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


def _warm_variants(resolved: Resolved, instance: InstancePlan, executor: BlockExecutor) -> None:
    """Compiles what a change of any layer's precision will need, with one layer of each kind at a time."""
    model = resolved.physical
    for stage in instance.stages:
        layers = {b.block: int(b.block.removeprefix("layers.")) for b in stage.blocks if b.block.startswith("layers.")}
        kinds = {name: (model.is_sparse(layer), model.window(layer)) for name, layer in layers.items()}
        warm = {(kinds[b.block], b.precision) for b in stage.blocks if b.block in kinds}
        for name, kind in kinds.items():
            for precision in resolved.variants:
                if (kind, precision) not in warm:
                    warm.add((kind, precision))
                    row = executor.prepare(name, resolved.checkpoint.variant(name, precision, model), precision)
                    executor.warm_layer(row)
                    row.free()


def _pool(resolved: Resolved, stage: StagePlan, placement: Placement) -> Array:
    model = resolved.physical
    sharding = placement.sharding(POOL_AXES)
    size, dtype = resolved.config.page_size, resolved.kv_dtype
    return kv_pool(resolved.reserved_kv_pages, model.num_kv_heads, size, model.head_dim, dtype, sharding)


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's tokenizer; None where the model's folder has none: prompts are then token ids."""
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer)
    if not (checkpoint.path / "tokenizer.json").is_file():
        log.warning("there is no tokenizer.json in %s: prompts must be token ids", checkpoint.path)
        return None
    return Tokenizer.load(checkpoint.path)
