"""Makes the instances of an engine: those of the start, and later ones from what other instances leave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from jaxserve.compilation.programs import Compiler, Program, StartsCompiling
from jaxserve.control import InstancePlan, StagePlan
from jaxserve.control.costs import CostModel
from jaxserve.control.regroup import split_plans
from jaxserve.core.block_names import is_layer
from jaxserve.core.clock import Clock
from jaxserve.core.precision import assignment_id
from jaxserve.core.progress import QUANTISING, READING, Progress, ignore_progress
from jaxserve.core.step_load import Loads
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.step_log import InstanceLog, StepLog
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.executor.apart import ApartPlacement
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.compile_ahead import StepCompiler
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.faults import Fault
from jaxserve.executor.fused import FusedTier
from jaxserve.executor.kv_exchange import Side
from jaxserve.executor.pools import Pools
from jaxserve.executor.programs import InstanceSizes, Programs
from jaxserve.kvcache import Lanes, PagePool
from jaxserve.parallel.placement import Placement
from jaxserve.planning.resolve import Resolved
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.telemetry import EngineMetrics
from jaxserve.telemetry.tracing import RequestTracer

Kinds = Sequence[Sequence[tuple[str, str]]]  # see `InstanceMaker._kinds`, for each stage


@dataclass(frozen=True)
class Parts:
    """What an instance has on its devices: its blocks in order, and its KV pools."""

    blocks: Sequence[LoadedBlock]
    pools: Pools


@dataclass
class InstanceMaker:
    """The maker of all instances of an engine. One thread at a time may use it."""

    resolved: Resolved
    programs: Programs
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    metrics: EngineMetrics
    clock: Clock
    fused_tier: Callable[[], FusedTier | None]
    new_compiler: Callable[[], Compiler]
    tracer: RequestTracer | None = None
    step_log: StepLog | None = None
    costs: CostModel | None = None  # of steps, once they were measured
    fault: Fault | None = None
    _numbers: count = field(default_factory=count)

    def sizes(self, plan: InstancePlan) -> InstanceSizes:
        """Return the sizes that the shapes of an instance's programs follow from."""
        limits = self.resolved.limits.limits_of(plan.tp, plan.lanes)
        return InstanceSizes(limits.shapes, self.resolved.segments(plan.tp), limits.max_len, plan.lanes)

    def placement(self, stage: StagePlan) -> Placement:
        """Return the devices of a stage."""
        return Placement(tuple(self.resolved.devices[index] for index in stage.devices))

    def load(
        self,
        plan: InstancePlan,
        progress: Progress = ignore_progress,
        *,
        between: Callable[[], None] | None = None,
        copied: Callable[[int], None] | None = None,
    ) -> Parts:
        """Load the blocks of an instance and make its pools. `between` and `copied` are as in `BlockStore.acquire`.

        What was loaded is freed if this raises.
        """
        blocks: list[LoadedBlock] = []
        checkpoint, total = self.resolved.checkpoint, len(plan.blocks)
        try:
            for stage in plan.stages:
                placement = self.placement(stage)
                for block in stage.blocks:
                    rounding = checkpoint.is_rounded(block.block, block.precision)
                    progress(QUANTISING if rounding else READING, len(blocks), total)
                    builder = self.programs.builder
                    loaded = builder.load(block.block, block.precision, placement, between=between, copied=copied)
                    blocks.append(loaded)
            progress(READING, total, total)
            return Parts(blocks, self._pools(plan))
        except BaseException:
            for loaded in blocks:
                loaded.free()
            raise

    def side(self, plan: InstancePlan) -> Side:
        """Return the pools that an instance has."""
        programs = (
            self.programs.pools(self.placement(stage))
            for stage in plan.stages
            for block in stage.blocks
            if is_layer(block.block)
        )
        return Side(tuple(programs), self.sizes(plan).segments)

    def compile_moves(self, plan: InstancePlan, compiler: StartsCompiling) -> None:
        """Tell `compiler` all programs by which an instance comes from others, and ends in favour of others.

        These are a merge of equal instances and its reverse, with any number of them, and a copy of an instance of the
        start on other devices.
        """
        smallest, kinds = self.resolved.config.tp, list(map(self._kinds, plan.stages))
        for degree in self.resolved.degrees:
            members = degree // smallest
            if members > 1 and plan.tp % members == 0 and plan.tp // members >= smallest:
                self._compile_merge(plan, members, kinds, compiler)
        for pools in dict.fromkeys(self.side(plan).programs):
            pools.compile(self.sizes(plan).kv_lanes, 1, compiler, copies=True)
            if plan.lanes > 1:  # lanes are exchanged one by one
                pools.compile(Lanes(self.sizes(plan).segments), 1, compiler, copies=True)
        for other in self.resolved.plan.instances:
            if other.tp == plan.tp and not other.same_place(plan):
                self._compile_blocks(plan, [other], kinds, compiler)

    def _compile_merge(self, plan: InstancePlan, members: int, kinds: Kinds, compiler: StartsCompiling) -> None:
        whole = plan.with_kv_pages(plan.kv_pages // members * members)
        parts = split_plans(whole, [str(index) for index in range(members)])
        self.programs.exchange(list(map(self.side, parts)), self.side(plan)).compile(compiler)
        self._compile_apart(plan, members, kinds, compiler)
        self._compile_blocks(plan, parts, kinds, compiler)
        for index, part in enumerate(parts):
            self._compile_blocks(part, [plan, *parts[:index]], kinds, compiler)

    def _compile_apart(self, plan: InstancePlan, members: int, kinds: Kinds, compiler: StartsCompiling) -> None:
        """Tell `compiler` the programs of layers that the members of an instance run apart."""
        builder, steps = self.programs.builder, StepCompiler(compiler, self.programs, self.sizes(plan))
        for stage, blocks in zip(plan.stages, kinds, strict=True):
            place = ApartPlacement(self.placement(stage), members)
            for block, precision in blocks:
                if is_layer(block):
                    steps.compile_apart(place, builder.apart_signature(block, precision, place))

    def _compile_blocks(
        self, target: InstancePlan, copies: Sequence[InstancePlan], kinds: Kinds, compiler: StartsCompiling
    ) -> None:
        """Tell `compiler` the programs by which an instance's blocks are made of those of others."""
        for stage, blocks in zip(target.stages, kinds, strict=True):
            for block, precision in blocks:
                placements = [self.placement(plan.stage_of(block)) for plan in copies]
                self.programs.builder.compile_copies(compiler, block, precision, self.placement(stage), placements)

    def _kinds(self, stage: StagePlan) -> list[tuple[str, str]]:
        """Return (block, precision) for each program that blocks of a stage run in the precisions they may have.

        Other blocks with this program have parameters of the same shapes.
        """
        signature, placement = self.programs.builder.signature, self.placement(stage)
        kinds: dict[Program, tuple[str, str]] = {}
        for planned in stage.blocks:
            variants = self.resolved.variants if is_layer(planned.block) else ()
            for precision in dict.fromkeys((planned.precision, *variants)):
                executable = signature(planned.block, precision, placement).executable
                kinds[executable] = planned.block, precision
        return list(kinds.values())

    def _faults(self, plan: InstancePlan) -> dict[int, Fault]:
        """Return the faults of an instance's stages."""
        if (fault := self.fault) is None:
            return {}
        return {index: fault for index, stage in enumerate(plan.stages) if fault.device in stage.devices}

    def _pools(self, plan: InstancePlan) -> Pools:
        """Return new pools of an instance."""
        side, compiler = self.side(plan), self.new_compiler()
        for own in dict.fromkeys(side.programs):
            own.compile_segments(side.sizes[:1], compiler)
        compiler.wait()
        return Pools(side.programs, side.sizes)

    def make(
        self, plan: InstancePlan, parts: Parts, pages: PagePool | None = None, compiler: Compiler | None = None
    ) -> StepLoop:
        """Return the step loop of an instance on its parts, without requests.

        `pages` are those of its pools if some of them have contents. The default `compiler` has threads of its own.
        """
        resolved, config, sizes = self.resolved, self.resolved.config, self.sizes(plan)
        compiler = compiler or self.new_compiler()
        scheduler, table = resolved.scheduler(plan, pages)
        sampler = self.programs.sampler(parts.blocks[-1].placement, sizes)
        sampler.compile_start(compiler)
        compiler.wait()
        executor = BlockExecutor(
            parts.blocks,
            parts.pools,
            self.programs,
            DeviceSampler(sampler),
            sizes.buckets,
            table,
            config.page_size,
            self.fused_tier(),
            compiler,
            self._faults(plan),
        )
        number = next(self._numbers)
        core = EngineCore(
            scheduler,
            resolved.info,
            self.tokenizer,
            self.metrics,
            eos_token_ids=self.eos_token_ids,
            salt=assignment_id(plan.layer_precisions),
            seed=config.seed + number,
            plan_fields=resolved.plan_fields(plan, resolved.plan.version),
            index=number,
            name=plan.name,
            loads=Loads(sizes.buckets),
            cost=None if self.costs is None else self.costs.of(plan),
            capacity=resolved.max_len(plan.tp),
            stages=len(plan.stages),
            trace=self.tracer,
        )
        log = None if self.step_log is None else InstanceLog(self.step_log, core, sizes.buckets)
        return StepLoop(core, executor, self.clock, overlap=config.overlap, stages=len(plan.stages), log=log)
