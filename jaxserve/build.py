"""Construction of engines: all parts are made from an `EngineConfig`, connected and warmed up."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from threading import Thread
from typing import Any, cast

import jax

from jaxserve.actuator import PlanActuator
from jaxserve.actuator.host import DeviceHost
from jaxserve.actuator.maker import InstanceMaker
from jaxserve.actuator.regroup import DeviceRegroupActuator
from jaxserve.actuator.throttle import Throttle
from jaxserve.calibration.sensitivity.kept_profile import kept_profile
from jaxserve.calibration.sensitivity.order import Sensitivity, sensitivity
from jaxserve.calibration.sensitivity.profile import FILE_NAME as PROFILE
from jaxserve.calibration.sensitivity.rounding_costs import FILE_NAME as COSTS, load_costs
from jaxserve.checkpoint.kept import KeptLayers, kept_folder
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.checkpoint.local import with_local_files
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.compilation.cache import CompileCounter, use_persistent_cache, user_cache_folder
from jaxserve.compilation.programs import Compiler
from jaxserve.compilation.saved import SavedPrograms, saved_programs
from jaxserve.control import InstancePlan, PlanInForce, Resources, StagePlan
from jaxserve.control.buddies import placements_of
from jaxserve.control.controller import Controller
from jaxserve.control.costs import CostModel, MeasuredCosts, slow_precisions
from jaxserve.control.groups import group_placements
from jaxserve.control.plan_yaml import to_dict
from jaxserve.control.policies import POLICY_NAMES, QualityLoss, load_policy
from jaxserve.control.policies.quality import FLOOR
from jaxserve.control.policy import ForesightPolicy, Policy, errors_of_policy
from jaxserve.control.reconfigure import PlanFacts
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.service import ControlPlane
from jaxserve.control.service_limits import ServiceLimits
from jaxserve.core.block_names import is_layer, layer_name
from jaxserve.core.clock import Clock, SystemClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.machine import trim_heap
from jaxserve.core.precision import BITS
from jaxserve.core.progress import Progress, ignore_progress
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.instances import InstanceSet
from jaxserve.engine.logged_controller import LoggedController
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.model_tokenizer import load_tokenizer
from jaxserve.engine.step_log import CostsRecord, StepLog, resource_facts
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.executor.block_store import BlockStore, ParameterSource
from jaxserve.executor.blocks import BlockBuilder
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.faults import Fault
from jaxserve.executor.fused import FusedTier
from jaxserve.executor.host_memory import HostMemory, PinnedMemory, pinned_memory
from jaxserve.executor.programs import Programs
from jaxserve.executor.timing import step_costs
from jaxserve.executor.warm_placements import WarmPlacements, WarmUp
from jaxserve.executor.warmup import warm_variants
from jaxserve.parallel.placement import Placement
from jaxserve.planning.memory import COPY_RATES, COPY_SHARES, copy_pace
from jaxserve.planning.resolve import Resolved, resolve
from jaxserve.planning.rounding_notice import rounding_notice
from jaxserve.planning.spec import STATIC
from jaxserve.structured.compiler import LLGrammarCompiler
from jaxserve.telemetry import EngineMetrics
from jaxserve.telemetry.tracing import RequestTracer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltEngine:
    """The parts of a loaded engine, which `SyncEngine` and `AsyncEngine` are made from."""

    instances: tuple[StepLoop, ...]
    info: ModelInfo
    tokenizer: Tokenizer | None
    grammars: LLGrammarCompiler | None  # of structured output; None without a tokenizer
    metrics: EngineMetrics
    clock: Clock
    control: ControlPlane | None
    in_force: PlanInForce
    host: DeviceHost | None  # of the instances, if they have a control plane
    limits: ServiceLimits
    close: Callable[[], None]
    resolved: Resolved
    compilations: CompileCounter
    maker: InstanceMaker
    warm: WarmPlacements
    store: BlockStore
    kept: KeptLayers

    @property
    def rounded_layers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The precisions that layers start in because they are rounded, and these layers."""
        return _rounded_layers(self.resolved)

    @property
    def loops(self) -> dict[str, StepLoop]:
        """The step loops by the names of their instances."""
        return {steps.core.name: steps for steps in self.instances}

    @property
    def actuators(self) -> Mapping[str, PlanActuator]:
        """The actuators of the instances that serve, by name; none without a control plane."""
        return {} if self.host is None else self.host.actuators

    @property
    def programs(self) -> Programs:
        """The programs of all instances."""
        return self.maker.programs

    def connect(self, front: InstanceSet) -> None:
        """Let the front that steps the instances follow the plan, and let the plan change its instances."""
        self.in_force.follow(front.reroute)
        if self.host is not None:
            self.host.connect(front)
        if self.control is not None:
            front.recover_by(self.control.can_recover)

    def renew(self) -> None:
        """Use layers and losses that were kept while the engine runs: from the next change of each layer on."""
        resolved = self.resolved
        if self.control is None:
            return
        kept = _kept_layers(resolved)
        known = known_sensitivity(resolved, kept)
        for stage in resolved.plan.instances[0].stages:
            for block, precision in product((b.block for b in stage.blocks if is_layer(b.block)), kept.precisions):
                self.store.renew(kept, block, precision, _placement(resolved, stage))
        self.control.renew(_policy_loader(resolved, known, self.maker.costs), known.loss)
        _log_losses(resolved, kept, known)


def build_engine(config: EngineConfig, progress: Progress = ignore_progress) -> SyncEngine:
    """Build an engine that its caller steps, and report to `progress` how far the start has come.

    Raise `ConfigError`, `CheckpointError` or `MemoryBudgetError` if the engine cannot be built.
    """
    built = build(config, progress=progress)
    engine = SyncEngine(
        built.loops,
        built.info,
        built.tokenizer,
        built.clock,
        grammars=built.grammars,
        route=built.limits.route,
        max_model_len=built.limits.max_model_len,
        on_close=built.close,
    )
    built.connect(engine)
    return engine


def build_async_engine(config: EngineConfig, progress: Progress = ignore_progress) -> AsyncEngine:
    """Build an engine that steps in threads of its own, for servers, with a control plane.

    Raise `ConfigError`, `CheckpointError` or `MemoryBudgetError` if the engine cannot be built.
    """
    return async_engine(build(config, controlled=True, progress=progress))


def async_engine(built: BuiltEngine) -> AsyncEngine:
    """Return a built engine with threads that step it. It closes what was built when it is shut down."""
    engine = AsyncEngine(
        built.loops,
        built.info,
        built.tokenizer,
        built.metrics,
        built.clock,
        grammars=built.grammars,
        control=built.control,
        route=built.limits.route,
        max_model_len=built.limits.max_model_len,
        on_close=built.close,
    )
    built.connect(engine)
    return engine


def build(
    config: EngineConfig,
    *,
    controlled: bool = False,
    host_memory: HostMemory = pinned_memory,
    progress: Progress = ignore_progress,
) -> BuiltEngine:
    """Resolve a configuration, load the model, place it on the devices and warm it up.

    With `controlled`, the engine has a control plane even if the policy changes nothing, so that operators can see the
    plan and set another one. `host_memory` returns the kind of host memory in which a device's variants are pinned.

    Raise `ConfigError`, `CheckpointError` or `MemoryBudgetError` if the engine cannot be built.
    """
    use_persistent_cache(config.compile_cache)
    config = with_local_files(config, progress)
    resolved = resolve(config)
    tracer = None if config.otlp_endpoint is None else RequestTracer(config.otlp_endpoint, resolved.info.name)
    controlled = controlled or config.policy != STATIC
    kept = _kept_layers(resolved)
    _log_rounding(resolved, kept)
    known = known_sensitivity(resolved, kept) if controlled else None
    load = _policy_loader(resolved, known) if known else None
    policy = load(config.policy) if load else None
    step_log = None if config.step_log is None else StepLog(config.step_log, _step_log_header(resolved, known))
    tokenizer = load_tokenizer(config, resolved.checkpoint.path, resolved.checkpoint.config.vocab_size)
    eos_token_ids = (*resolved.padded_model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
    grammars = None if tokenizer is None else LLGrammarCompiler(tokenizer, eos_token_ids)
    build_labels = {"jax": jax.__version__, "device": resolved.devices[0].device_kind}
    cache_config = partial(_cache_config, resolved)
    metrics = EngineMetrics(resolved.info.name, cache_config, config.metrics_prefix, build_labels)
    compilations = CompileCounter(metrics.compiled)
    clock = SystemClock()
    store = _block_store(resolved, kept, host_memory(resolved.devices[0]))
    saved = saved_programs(resolved.padded_model, resolved.devices)
    programs = _programs(resolved, store)
    maker = InstanceMaker(
        resolved,
        programs,
        tokenizer,
        eos_token_ids,
        metrics,
        clock,
        fused_tier=partial(_fused_tier, resolved, compilations, saved, programs),
        new_compiler=lambda: Compiler(saved, progress),
        tracer=tracer,
        step_log=step_log,
        fault=None if config.inject_fault is None else Fault.of(config.inject_fault),
    )
    to_warm = WarmUp(
        maker.sizes,
        resolved.variants,
        _fuses(resolved),
        foreseen=partial(_foreseen, resolved, policy),
        moves=maker.compile_moves if controlled and _may_regroup(resolved) else lambda plan, compiler: None,
    )
    warm = WarmPlacements(programs, saved, compilations, resolved.devices, to_warm)
    instances = [maker.make(plan, maker.load(plan, progress)) for plan in resolved.plan.instances]
    executors = [cast(BlockExecutor, steps.executor) for steps in instances]
    if config.warmup:
        _warm_up(resolved, executors, policy)
    if grammars is not None and eos_token_ids:
        Thread(target=grammars.prepare, name="jaxserve-grammars", daemon=True).start()
    if _rounded_layers(resolved) or kept.precisions:
        _log_losses(resolved, kept, known or known_sensitivity(resolved, kept))
    in_force = PlanInForce(resolved.plan)
    control = host = regrouper = None
    if known and load and policy:
        _hold_variants(resolved, store)
        if config.warmup and resolved.variants:
            costs = _step_costs(resolved, executors[0], _foreseen(resolved, policy, resolved.plan.instances[0]))
            for steps, instance in zip(instances, resolved.plan.instances, strict=True):
                steps.core.replan(steps.core.salt, steps.core.plan_fields, costs.of(instance))
            if step_log is not None:
                step_log.write(CostsRecord(costs.to_dict()))
            maker.costs = costs
            # Loaded again, now that steps were timed: foresight, which the warm-up needed, does not depend on that.
            load = _policy_loader(resolved, known, costs)
            policy = load(config.policy)
        host = _build_host(maker, instances, in_force)
        regrouper = _build_regrouper(maker, host, in_force, warm)
        control = _build_control_plane(maker, policy, load, host, regrouper, in_force, known.loss)
        metrics.follow_control(control.state)
        if config.warmup:
            merged = placements_of(resolved.plan, resolved.degrees[-1])
            merged += group_placements(resolved.plan, resolved.limits.max_lanes, resolved.limits)
            # Those of the start have everything but the programs by which they end in favour of others.
            present = resolved.plan.instances if _may_regroup(resolved) else ()
            warm.warm_in_background((*merged, *present))
    limits = ServiceLimits(in_force, _resources(resolved, None), lambda: None if control is None else control.policy)

    def close() -> None:
        for part in (control, regrouper, warm, host, step_log, tracer):
            if part is not None:
                part.close()
        compilations.close()
        if host is None:
            for executor in executors:
                executor.close()
        store.close()

    return BuiltEngine(
        tuple(instances),
        resolved.info,
        tokenizer,
        grammars,
        metrics,
        clock,
        control,
        in_force,
        host,
        limits,
        close,
        resolved,
        compilations,
        maker,
        warm,
        store,
        kept,
    )


def _block_store(resolved: Resolved, source: ParameterSource, memory: str | None) -> BlockStore:
    """Return the store of all instances' parameters. Variants lie in host memory of kind `memory`, if there is one."""
    host_is_device = memory is None and resolved.devices[0].platform == "cpu"
    pinned, may_drop = None, resolved.limits.max_lanes > 1
    if memory is not None and (resolved.variants or may_drop):
        pinned = PinnedMemory(memory)
        first, *others = ([_placement(resolved, s) for s in i.stages] for i in resolved.plan.instances)
        pinned.check({pair for stages in (first, *others) for pair in zip(first, stages, strict=True)})
    return BlockStore(
        source,
        resolved.padded_model,
        resolved.variants,
        host_is_device=host_is_device,
        pinned=pinned,
        may_drop=may_drop,
    )


def _programs(resolved: Resolved, store: BlockStore) -> Programs:
    """Return the programs of all instances, none of which is compiled yet."""
    layouts = partial(stored_layout, resolved.checkpoint, resolved.padded_model)
    return Programs(
        BlockBuilder(resolved.padded_model, store, layouts),
        page_size=resolved.config.page_size,
        kv_dtype=resolved.kv_dtype,
        top_logprobs=max(resolved.info.max_logprobs, 1),
    )


def _placement(resolved: Resolved, stage: StagePlan) -> Placement:
    return Placement(tuple(resolved.devices[index] for index in stage.devices))


def _hold_variants(resolved: Resolved, store: BlockStore) -> None:
    """Hold every variant that layers may change to in the host's memory."""
    for stage in resolved.plan.instances[0].stages:
        for block, precision in product((b.block for b in stage.blocks if is_layer(b.block)), resolved.variants):
            store.hold(block, precision, _placement(resolved, stage))


def _foreseen(resolved: Resolved, policy: Policy | None, instance: InstancePlan) -> Sequence[InstancePlan]:
    """Return the plans that a policy may hold for long in an instance, and whose steps are therefore fused.

    There are none on GPU: such plans have KV pools of more segments there, and each would take seconds a shape.
    Raise `ConfigError` if the policy raises.
    """
    if not isinstance(policy, ForesightPolicy) or resolved.devices[0].platform != "cpu":
        return ()
    with errors_of_policy(f"policy {policy.name}: foresee"):
        return policy.foresee(instance)


def _may_regroup(resolved: Resolved) -> bool:
    """Return whether there are several instances, or devices for another one."""
    config = resolved.config
    used = config.tp * config.pp * config.dp
    # A CPU has as many devices as the configuration wants, and others may be those of another engine.
    there = config.virtual_devices or used if resolved.devices[0].platform == "cpu" else len(resolved.devices)
    return config.dp > 1 or there > used


def _build_host(maker: InstanceMaker, instances: Sequence[StepLoop], in_force: PlanInForce) -> DeviceHost:
    """Return the host of the instances, with an actuator for each."""
    resolved, metrics = maker.resolved, maker.metrics
    platform = resolved.devices[0].platform
    pace, share = copy_pace(platform), COPY_SHARES[platform]

    def new_actuator(name: str, steps: StepLoop) -> PlanActuator:
        return PlanActuator(
            name,
            steps,
            cast(BlockExecutor, steps.executor),
            metrics,
            in_force,
            ledgers=resolved.ledgers,
            entries=resolved.device_entries,
            facts=PlanFacts(resolved.plan_fields, maker.costs),
            pace=pace,
            copy_share=share,
        )

    return DeviceHost(
        maker, {steps.core.name: steps for steps in instances}, new_actuator, partial(Throttle, pace, share)
    )


def _build_regrouper(
    maker: InstanceMaker, host: DeviceHost, in_force: PlanInForce, warm: WarmPlacements
) -> DeviceRegroupActuator:
    """Return what merges, splits, adds and removes instances."""
    resolved = maker.resolved
    regrouping = Regrouping(
        host,
        in_force,
        _resources(resolved, maker.costs),
        resolved.ledgers,
        resolved.device_entries,
        PlanFacts(resolved.plan_fields, maker.costs),
        maker.clock.now,
        exchanged=lambda done: maker.metrics.exchanged(done.chunks, done.bytes, done.seconds, done.held_seconds),
    )
    is_warm = warm.is_or_becomes_warm if resolved.config.warmup else lambda plan: True
    return DeviceRegroupActuator(regrouping, lambda: host.front, maker.metrics, is_warm)


def _copy_rate(resolved: Resolved) -> float:
    return COPY_RATES[resolved.devices[0].platform]


def _warm_up(resolved: Resolved, executors: Sequence[BlockExecutor], policy: Policy | None) -> None:
    """Compile everything that the instances run, now and with the variants that their layers may change to."""
    first, *others = executors
    first.compile()  # the executables of the others are loaded from these, all at once
    for executor in others:
        executor.start_compiling()
    for executor, instance in zip(executors, resolved.plan.instances, strict=True):
        executor.warm()
        foreseen = _foreseen(resolved, policy, instance)
        warm_variants(executor, resolved.padded_model, instance, resolved.variants, foreseen)
        executor.settle()
        trim_heap()


def _step_costs(resolved: Resolved, executor: BlockExecutor, foreseen: Sequence[InstancePlan]) -> MeasuredCosts:
    """Return the measured costs of steps, and log which precisions are not faster than full precision."""
    config, model = resolved.config, resolved.padded_model
    facts = {
        "page_size": config.page_size,
        "kv_dtype": resolved.kv_dtype,
        "kv_pages": resolved.plan.instances[0].kv_pages,
        "max_model_len": resolved.max_model_len,
        "fuse": config.fuse,
    }
    instance, variants = resolved.plan.instances[0], resolved.variants
    fused = [plan.layer_precisions for plan in (instance, *foreseen)] if executor.fuses else []
    costs = step_costs(executor, model, instance, variants, fused, facts)
    for sentence in slow_precisions(costs, model.dtype, resolved.buckets.max_num_seqs):
        log.warning("%s", sentence)
    return costs


def _resources(resolved: Resolved, costs: CostModel | None) -> Resources:
    return replace(resolved.resources(_copy_rate(resolved)), costs=costs)


def _policy_loader(resolved: Resolved, known: Sensitivity, costs: MeasuredCosts | None = None) -> Callable[..., Policy]:
    """Return `load_policy` with the arguments that describe this engine."""
    return partial(
        load_policy,
        resources=_resources(resolved, costs),
        swap_order=known.swap_order,
        **_objectives(resolved.config),
        loss=known.loss,
    )


def _objectives(config: EngineConfig) -> dict[str, float | None]:
    """Return the objectives of a configuration by their names in `load_policy`."""
    return {name: getattr(config, name) for name in ("slo_ttft", "slo_tpot", "max_quality_loss")}


def _build_control_plane(
    maker: InstanceMaker,
    policy: Policy,
    load: Callable[..., Policy],
    host: DeviceHost,
    regrouper: DeviceRegroupActuator,
    in_force: PlanInForce,
    loss: QualityLoss,
) -> ControlPlane:
    resolved, step_log = maker.resolved, maker.step_log
    resources = _resources(resolved, maker.costs)
    make_controller = Controller if step_log is None else partial(LoggedController, step_log)
    return ControlPlane(
        make_controller(in_force, policy, resources, host.actuators, regrouper=regrouper),
        resources,
        resolved.ledgers,
        maker.clock,
        snapshots=host.snapshots,
        waiting=host.waiting_room,
        longest=host.longest,
        policy_names=POLICY_NAMES,
        load_policy=load,
        started_with=str(resolved.config.policy),
        loss=loss,
    )


def _cache_config(resolved: Resolved, pages: int) -> dict[str, Any]:
    """Return the labels of the metric that describes a KV cache of `pages` pages, named as in vLLM."""
    config, windows = resolved.config, set(resolved.padded_model.windows)
    tokens = pages * config.page_size
    return {
        "block_size": config.page_size,
        "cache_dtype": resolved.kv_dtype,
        "enable_prefix_caching": config.prefix_caching,
        "kv_cache_max_concurrency": tokens / resolved.info.max_model_len,
        "kv_cache_size_tokens": tokens,
        "num_gpu_blocks": pages,
        "num_gpu_blocks_override": config.kv_pages,
        "sliding_window": windows.pop() if len(windows) == 1 else None,
    }


def _step_log_header(resolved: Resolved, known: Sensitivity | None) -> dict[str, Any]:
    """Return the facts about the engine that a step log begins with."""
    config, resources = resolved.config, resolved.resources(_copy_rate(resolved))
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
        **_objectives(config),
        "swap_order": known.swap_order if known else (),
        "layer_losses": known.loss.by_layer if known else None,
        "resources": resource_facts(resources, resolved.plan),
    }


def known_sensitivity(resolved: Resolved, kept: KeptLayers) -> Sensitivity:
    """Return what is known of the layers: by the profile in the model's folder, or else by what was kept."""
    checkpoint, num_layers = resolved.checkpoint, resolved.padded_model.num_layers
    if (checkpoint.path / PROFILE).is_file() or kept.folder is None:
        weights = partial(fingerprint, checkpoint)
        return sensitivity(checkpoint.path, num_layers, resolved.variants, weights)
    profile = kept_profile(kept)
    costs = load_costs(kept.folder / COSTS, partial(fingerprint, checkpoint))
    return Sensitivity.of(num_layers, resolved.variants, profile, costs)


def _rounded_layers(resolved: Resolved) -> tuple[tuple[str, tuple[int, ...]], ...]:
    layers: dict[str, list[int]] = {}
    for index, precision in enumerate(resolved.plan.instances[0].layer_precisions):
        if precision in BITS and resolved.checkpoint.is_rounded(layer_name(index), precision):
            layers.setdefault(precision, []).append(index)
    return tuple((precision, tuple(indices)) for precision, indices in layers.items())


def _log_rounding(resolved: Resolved, kept: KeptLayers) -> None:
    """Log that layers are or may be rounded without calibration."""
    precisions = (*resolved.plan.instances[0].layer_precisions, *resolved.variants)
    rounded = [precision for precision in dict.fromkeys(precisions) if precision not in kept.precisions]
    notice = rounding_notice(resolved.checkpoint, resolved.padded_model, rounded)
    if notice is not None and resolved.config.load_format != "dummy":
        log.warning("%s", notice)


def _log_losses(resolved: Resolved, kept: KeptLayers, known: Sensitivity) -> None:
    """Log what fewer bits were measured to cost: layers that are rounded, and all layers that were prepared."""
    num_layers, loss = resolved.padded_model.num_layers, known.loss
    costs = {} if kept.folder is None else load_costs(kept.folder / COSTS, partial(fingerprint, kept.checkpoint))
    command = f"jaxserve quantize {kept.checkpoint.path}"
    for precision, layers in _rounded_layers(resolved):
        if precision in costs and costs[precision].layers == layers:
            text = costs[precision].text(precision, num_layers, command)
        elif loss.is_measured([precision]):
            share = sum(loss.by_layer[precision][layer] for layer in layers)
            text = f"layers rounded to {precision} lose about {100 * share:.1f} % by {PROFILE}; `{command}` lowers it"
        else:
            continue
        much = sum(loss.by_layer[precision][layer] for layer in layers) > FLOOR
        log.log(logging.WARNING if much else logging.INFO, "%s", text)
    for precision in kept.precisions:
        share = loss([precision] * num_layers)
        log.info(
            "layers prepared in %s are used; all of them lose %.1f %% on the model's own text", precision, 100 * share
        )


def _kept_layers(resolved: Resolved) -> KeptLayers:
    """Return the checkpoint, with kept layers in precisions that no layer starts in.

    What layers start in stays what it was, so that a model answers the same at every start.
    """
    config, started = resolved.config, resolved.plan.instances[0].layer_precisions
    made = config.load_format == "dummy"
    folder = None if made else kept_folder(resolved.checkpoint.path, user_cache_folder())
    return KeptLayers(resolved.checkpoint, folder, tuple(name for name in resolved.variants if name not in started))


def _fuses(resolved: Resolved) -> bool:
    """Return whether steps that only decode are fused before an instance serves: by default if it is warmed up."""
    config = resolved.config
    return config.warmup if config.fuse is None else config.fuse


def _fused_tier(
    resolved: Resolved, compilations: CompileCounter, saved: SavedPrograms, programs: Programs
) -> FusedTier | None:
    """Return the fused tier of an instance, or None if it runs all steps block by block."""
    if not _fuses(resolved):
        return None
    return FusedTier(compilations, compiler=Compiler(saved), programs=programs.fused)
