"""The one place where the parts are wired together: from an `EngineConfig` to engines that are ready to serve."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxserve.actuator import HostMemory, LayerSource, Place, PlanActuator, RunningInstance, pinned_memory, pinned_store
from jaxserve.calibration.sensitivity.order import swap_order
from jaxserve.checkpoint import Checkpoint
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.compilation.cache import CompileCounter, use_persistent_cache
from jaxserve.compilation.programs import Compiler
from jaxserve.compilation.saved import saved_programs
from jaxserve.control import BlockPlan, InstancePlan
from jaxserve.control.controller import Controller
from jaxserve.control.plan_yaml import to_dict
from jaxserve.control.policies import POLICY_NAMES, load_policy
from jaxserve.control.policy import Foresees, Policy
from jaxserve.control.service import ControlPlane
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.clock import Clock, SystemClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.core.machine import trim_heap
from jaxserve.core.precision import assignment_id
from jaxserve.core.progress import QUANTISING, READING, Progress, ignore_progress
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.step_log import InstanceLog, LoggedController, StepLog
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.engine.tokenizer_files import has_vocabulary, missing_vocabulary
from jaxserve.executor.blocks import BlockBuilder, BlockSignature, LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.fused import PATIENCE, FusedTier
from jaxserve.executor.pools import Pools
from jaxserve.kernels import Pool, kv_pool
from jaxserve.parallel.placement import POOL_AXES, Placement
from jaxserve.planning.memory import COPY_RATES, COPY_SHARES
from jaxserve.planning.resolve import Resolved, resolve
from jaxserve.planning.spec import STATIC
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.scheduler import Scheduler
from jaxserve.telemetry import EngineMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltEngine:
    """A loaded engine: what the synchronous and the asynchronous front have in common."""

    instances: tuple[StepLoop, ...]
    info: ModelInfo
    tokenizer: Tokenizer | None
    metrics: EngineMetrics
    clock: Clock
    control: ControlPlane | None
    actuator: PlanActuator | None
    close: Callable[[], None]
    resolved: Resolved
    compilations: CompileCounter


def build_engine(config: EngineConfig, progress: Progress = ignore_progress) -> SyncEngine:
    """Build an engine that the caller steps. `progress` is told how far its start is.

    Raises `ConfigError`, `CheckpointError` or `MemoryBudgetError`.
    """
    built = build(config, progress=progress)
    return SyncEngine(built.instances, built.info, built.tokenizer, built.clock, on_close=built.close)


def build_async_engine(config: EngineConfig, progress: Progress = ignore_progress) -> AsyncEngine:
    """An engine with threads of its own, for servers. Raises as `build_engine`."""
    built = build(config, controlled=True, progress=progress)
    return AsyncEngine(
        built.instances,
        built.info,
        built.tokenizer,
        built.metrics,
        built.clock,
        control=built.control,
        on_close=built.close,
    )


def build(
    config: EngineConfig,
    *,
    controlled: bool = False,
    host_memory: HostMemory = pinned_memory,
    progress: Progress = ignore_progress,
) -> BuiltEngine:
    """Resolves, loads, places and warms. `controlled`: with a control plane even for a policy that changes nothing, so
    that operators see the plan and may give another. `host_memory` says where variants are kept for a device.
    """
    use_persistent_cache(config.compile_cache)
    resolved = resolve(config)
    controlled = controlled or config.policy != STATIC
    load = _policy_loader(resolved) if controlled else None
    policy = load(config.policy) if load else None
    foreseen = policy.foresee(resolved.plan) if isinstance(policy, Foresees) else ()
    step_log = None if config.step_log is None else StepLog(config.step_log, _facts(resolved))
    tokenizer = _load_tokenizer(config, resolved.checkpoint)
    metrics = EngineMetrics(resolved.info.name, _cache_config(resolved))
    compilations = CompileCounter(metrics.compiled)
    clock = SystemClock()
    memory = host_memory(resolved.devices[0])
    pin_full = memory is not None or resolved.devices[0].platform != "cpu"
    source = LayerSource(resolved.checkpoint, resolved.padded_model, pin_full=pin_full)
    if resolved.variants and not pin_full:
        resolved.checkpoint.store.remember()  # before layers are loaded, which are to be the same when they come back
    saved = saved_programs(resolved.padded_model, resolved.devices)
    instances, executors = [], []
    for number, instance in enumerate(resolved.plan.instances):
        executor, scheduler = _build_instance(resolved, instance, compilations, Compiler(saved, progress), progress)
        executors.append(executor)
        core = EngineCore(
            scheduler,
            resolved.info,
            tokenizer,
            metrics,
            eos_token_ids=(*resolved.padded_model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())),
            salt=assignment_id(instance.layer_precisions),
            seed=config.seed + number,
            plan_fields=resolved.plan_fields(resolved.plan, number),
            index=number,
        )
        if config.warmup:
            executor.warm()
            _warm_variants(resolved, instance, executor, source, [plan.instances[number] for plan in foreseen])
            executor.settle()
            trim_heap()
        logged = None if step_log is None else InstanceLog(step_log, core, resolved.buckets)
        instances.append(StepLoop(core, executor, clock, overlap=config.overlap, log=logged))

    actuator = control = None
    if load and policy:
        pairs = [RunningInstance(steps, executor) for steps, executor in zip(instances, executors, strict=True)]
        actuator = _actuator(resolved, pairs, source, metrics, memory)
        control = _control_plane(resolved, policy, load, instances, actuator, clock, step_log)

    def close() -> None:
        for part in (control, actuator, step_log):
            if part is not None:
                part.close()
        compilations.close()
        for executor in executors:
            executor.close()
        source.close()

    return BuiltEngine(
        tuple(instances), resolved.info, tokenizer, metrics, clock, control, actuator, close, resolved, compilations
    )


def _actuator(
    resolved: Resolved,
    instances: Sequence[RunningInstance],
    source: LayerSource,
    metrics: EngineMetrics,
    memory: str | None,
) -> PlanActuator:
    """What carries changes of the plan out, with every variant in the host's memory if there is more than one.

    They are in the devices' `memory` of this kind there, if it has one. Where the host is the device, and has one
    instance, rows use what is kept: no copy for such a layer.
    """
    place: Place | None = None
    in_place = memory is None and resolved.pinned.in_place
    if memory is not None and resolved.variants:
        place = pinned_store([instance.executor for instance in instances], memory)
    elif in_place:
        place = instances[0].executor.place
    for block, precision in resolved.layer_bytes if resolved.variants else ():
        source.load(block, precision, place)
        if in_place and precision in resolved.pinned.in_place_precisions:
            _use_kept(instances[0].executor, source, block, precision)
    return PlanActuator(
        resolved.plan,
        instances,
        source,
        metrics,
        ledger=resolved.ledger,
        entries=resolved.ledger_entries,
        plan_fields=resolved.plan_fields,
        copy_rate=_copy_rate(resolved),
        copy_share=COPY_SHARES[resolved.devices[0].platform],
    )


def _use_kept(executor: BlockExecutor, source: LayerSource, block: str, precision: str) -> None:
    """Makes the row of what is kept, and has a layer that runs in this precision from the start use it, instead of what
    it was loaded with.
    """
    row = executor.prepare(block, source.parameters(block, precision), precision)
    if any((row.block, row.precision) == (block, precision) for row in executor.blocks):
        for loaded in executor.replace([row]):
            loaded.free()


def _copy_rate(resolved: Resolved) -> float:
    return COPY_RATES[resolved.devices[0].platform]


def _policy_loader(resolved: Resolved) -> Callable[..., Policy]:
    """Makes a policy for this engine from what names it."""
    resources, slo_ttft = resolved.resources(_copy_rate(resolved)), resolved.config.slo_ttft
    return partial(load_policy, resources=resources, swap_order=_swap_order(resolved), slo_ttft=slo_ttft)


def _control_plane(
    resolved: Resolved,
    policy: Policy,
    load: Callable[..., Policy],
    instances: Sequence[StepLoop],
    actuator: PlanActuator,
    clock: Clock,
    step_log: StepLog | None,
) -> ControlPlane:
    """The controller of the plan, with the policy that it asks."""
    config = resolved.config
    resources = resolved.resources(_copy_rate(resolved))
    kind = Controller if step_log is None else partial(LoggedController, step_log)
    controller = kind(resolved.plan, policy, resources, actuator=actuator)
    return ControlPlane(
        controller,
        resources,
        resolved.ledger,
        clock,
        snapshots=lambda: [steps.core.snapshot for steps in instances],
        policy_names=POLICY_NAMES,
        load_policy=load,
        started_with=str(config.policy),  # which may be a file
    )


def _cache_config(resolved: Resolved) -> dict[str, Any]:
    """Return how the KV cache is set up, under the names of vLLM's metric."""
    config = resolved.config
    return {
        "block_size": config.page_size,
        "cache_dtype": resolved.kv_dtype,
        "enable_prefix_caching": config.prefix_caching,
    }


def _facts(resolved: Resolved) -> dict[str, Any]:
    """What a step log says of the engine first."""
    config, resources = resolved.config, resolved.resources(_copy_rate(resolved))
    controlled = config.policy != STATIC
    return {
        "model": resolved.info.name,
        "platform": resolved.devices[0].platform,
        "kv_dtype": resolved.kv_dtype,
        "plan": to_dict(resolved.plan),
        "buckets": asdict(resolved.buckets),
        "page_size": config.page_size,
        "reserved_kv_pages": resolved.reserved_kv_pages,
        "prefix_caching": config.prefix_caching,
        "overlap": config.overlap,
        "max_model_len": resolved.info.max_model_len,
        "policy": str(config.policy),
        "slo_ttft": config.slo_ttft,
        "swap_order": _swap_order(resolved) if controlled else (),
        "resources": asdict(resources) | {"layer_bytes": [(*key, n) for key, n in resources.layer_bytes.items()]},
    }


def _swap_order(resolved: Resolved) -> tuple[int, ...]:
    checkpoint = resolved.checkpoint
    weights = partial(fingerprint, checkpoint)
    return swap_order(checkpoint.path, resolved.padded_model.num_layers, resolved.variants, weights)


def _build_instance(
    resolved: Resolved, instance: InstancePlan, compilations: CompileCounter, compiler: Compiler, progress: Progress
) -> tuple[BlockExecutor, Scheduler]:
    config, buckets = resolved.config, resolved.buckets
    builder = BlockBuilder(resolved.padded_model)
    rows: list[LoadedBlock] = []
    pools: list[Callable[[int], Pool]] = []
    total = len(instance.blocks)
    for stage in instance.stages:
        placement = Placement(tuple(resolved.devices[i] for i in stage.devices))
        for block in stage.blocks:
            rounding = resolved.checkpoint.is_rounded(block.block, block.precision)
            progress(QUANTISING if rounding else READING, len(rows), total)
            tensors = resolved.checkpoint.variant(block.block, block.precision, resolved.padded_model)
            if block.block == "head" and resolved.padded_model.tie_embeddings and rows[0].placement == placement:
                tensors |= {"weight": jax.tree.unflatten(jax.tree.structure(tensors["weight"]), rows[0].leaves)}
            rows.append(builder.build(block.block, tensors, placement, block.precision))
            resolved.checkpoint.forget(block.block, block.precision)  # else a prepared layer would be there twice
            if is_layer(block.block):
                pools.append(_pool_maker(resolved, placement))
    progress(READING, total, total)
    scheduler, table = resolved.scheduler(instance)
    sampler = DeviceSampler(
        rows[-1].placement,
        slots=buckets.max_num_seqs,
        vocab=resolved.padded_model.vocab_rows,
        max_len=resolved.info.max_model_len,
        top_logprobs=max(resolved.info.max_logprobs, 1),
        backend=config.kernel_backend,
    )
    fused = _fused_tier(resolved, compilations, compiler)
    executor = BlockExecutor(
        rows, Pools(pools, resolved.segments), builder, sampler, buckets, table, config.page_size, fused, compiler
    )
    return executor, scheduler


def _fused_tier(resolved: Resolved, compilations: CompileCounter, compiler: Compiler) -> FusedTier | None:
    """On CPU at warm-up: it takes half a second a shape there, and later it would take the steps' cores."""
    config, on_cpu = resolved.config, resolved.devices[0].platform == "cpu"
    if config.fuse is False or (config.fuse is None and on_cpu and not config.warmup):
        return None
    background = config.fuse is True or not on_cpu
    return FusedTier(compilations, patience=PATIENCE if background else None, at_warmup=on_cpu, compiler=compiler)


def _warm_variants(
    resolved: Resolved,
    instance: InstancePlan,
    executor: BlockExecutor,
    source: LayerSource,
    foreseen: Sequence[InstancePlan],
) -> None:
    """Compiles what a change of any layer's precision will need, with one layer of each kind at a time, and fuses the
    mixtures that are foreseen.
    """
    model = resolved.padded_model
    outlines: dict[BlockPlan, BlockSignature] = {}
    for stage in instance.stages:
        layers = {b.block: layer_index(b.block) for b in stage.blocks if is_layer(b.block)}
        kinds = {name: (model.is_sparse(layer), model.window(layer)) for name, layer in layers.items()}
        warm = {(kinds[row.block], row.precision): row.signature() for row in executor.blocks if row.block in kinds}
        for name, kind in kinds.items():
            for precision in resolved.variants:
                if (kind, precision) not in warm:
                    row = executor.prepare(name, source.parameters(name, precision), precision)
                    executor.warm_layer(row)
                    warm[kind, precision] = row.signature()
                    row.free()
        for (kind, precision), outline in warm.items():
            outlines |= {BlockPlan(name, precision): outline for name in kinds if kinds[name] == kind}
    for plan in foreseen:
        layers = [block for block in plan.blocks if is_layer(block.block)]
        if outlines.keys() >= set(layers):  # a policy of the user's may foresee what cannot be
            executor.fuse_decodes([outlines[block] for block in layers])


def _pool_maker(resolved: Resolved, placement: Placement) -> Callable[[int], Pool]:
    """Makes segments of a layer's KV pool, of any number of pages."""
    model = resolved.padded_model
    return partial(
        kv_pool,
        kv_heads=model.num_kv_heads,
        page_size=resolved.config.page_size,
        head_dim=model.head_dim,
        dtype=resolved.kv_dtype,
        device=placement.sharding(POOL_AXES),
    )


def check_serves_text(config: EngineConfig) -> None:
    """Raise `CheckpointError` for a model without a tokenizer, unless it is to be served without one.

    Random weights (`load_format` "dummy") need none.
    """
    if config.model is None or config.tokenizer is not None or config.skip_tokenizer_init:
        return
    folder = Path(config.model)
    if config.load_format != "dummy" and (folder / "config.json").is_file() and not has_vocabulary(folder):
        raise CheckpointError(
            f"{missing_vocabulary(folder)}. Name another folder or file by --tokenizer; or, by --skip-tokenizer-init,"
            " serve prompts of token ids alone"
        )


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the model's tokenizer, or None where its folder has none: prompts are then token ids."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None and not has_vocabulary(checkpoint.path):
        log.warning("%s: prompts must be token ids", missing_vocabulary(checkpoint.path))
        return None
    source = checkpoint.path if config.tokenizer is None else config.tokenizer
    tokenizer = Tokenizer.load(source, config.chat_template)
    if tokenizer.builtin_template is not None and config.chat_template is None:
        log.warning(
            "%s has no chat template: conversations are written in the built-in format %r (--chat-template)",
            source,
            tokenizer.builtin_template,
        )
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        log.warning(
            "the tokenizer in %s has %d tokens and the model %d: a prompt with one of the others is refused",
            source,
            tokenizer.vocab_size,
            checkpoint.config.vocab_size,
        )
    return tokenizer
