"""Which placements are warm, and compilation for others in the background, while instances serve.

A placement is warm for an instance if all programs are there that its steps, its KV pools and its sampler run, in the
precisions that its layers have and may change to. Programs are compiled from shapes alone: no parameters, pools or
sampler states exist for them, and nothing runs on the devices.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.compilation.cache import AHEAD_TIER, CompileCounter
from jaxserve.compilation.programs import Compiler, Program, StartsCompiling, abstract
from jaxserve.compilation.saved import SavedPrograms
from jaxserve.control import InstancePlan, StagePlan
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.executor.blocks import BlockSignature
from jaxserve.executor.compile_ahead import StepCompiler
from jaxserve.executor.fused import StageProgram, shared_key
from jaxserve.executor.programs import InstanceSizes, Programs
from jaxserve.executor.stages import Stage
from jaxserve.parallel.placement import Placement

log = logging.getLogger(__name__)

LOW_PRIORITY = 19  # of the thread that compiles in the background, as `nice` counts
MAX_PAUSE_S = 1.0
RETRY_S = 60.0  # after which what failed to compile is tried again

AbstractStage = Stage[BlockSignature]


@dataclass(frozen=True)
class WarmUp:
    """What instances of an engine have to be warm for, besides the precisions that they start with."""

    sizes: Callable[[InstancePlan], InstanceSizes]
    variants: Sequence[str] = ()  # precisions that any layer may change to
    fused: bool = False  # whether steps that only decode are fused before an instance serves
    foreseen: Callable[[InstancePlan], Sequence[InstancePlan]] = lambda plan: ()  # plans whose steps are fused as well
    # Tells a compiler the programs by which an instance comes from others, and ends in favour of others.
    moves: Callable[[InstancePlan, StartsCompiling], None] = lambda plan, compiler: None


class WarmPlacements:
    """The warm placements of an engine, and a thread that warms others. Thread-safe."""

    def __init__(
        self,
        programs: Programs,
        saved: SavedPrograms,
        counter: CompileCounter,
        devices: Sequence[jax.Device],
        to: WarmUp,
    ):
        """Plans name devices by their indices in `devices`."""
        self._programs, self._saved, self._counter, self._devices, self._to = programs, saved, counter, devices, to
        self._waiting: deque[InstancePlan] = deque()
        self._known: set[Hashable] = set()  # what was found warm: programs are not forgotten
        self._not_before: dict[Hashable, float] = {}  # what was asked for -> when to try again (s); see `_run`
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def is_warm(self, plan: InstancePlan) -> bool:
        """Return whether an instance of this plan would compile and load nothing."""
        identity = _identity(plan)
        if identity in self._known:
            return True
        try:
            self._visit(plan, _Present(), self._check_fused)
        except _MissingError:
            return False
        self._known.add(identity)
        return True

    def is_or_becomes_warm(self, plan: InstancePlan) -> bool:
        """Return `is_warm`, and begin to warm the placement in the background if it is not."""
        if self.is_warm(plan):
            return True
        if self._not_before.get(_identity(plan), 0.0) <= time.monotonic():
            self.warm_in_background([plan])
        return False

    def warm_in_background(self, plans: Iterable[InstancePlan]) -> None:
        """Compile for these plans, one after another, in a thread of low priority."""
        plans = list(plans)
        with self._changed:
            self._not_before.update(dict.fromkeys(map(_identity, plans), math.inf))
            self._waiting.extend(plans)
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(target=self._run, name="jaxserve-warm", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the background thread has nothing left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """End the background thread, after the program that it is compiling."""
        self._closing.set()
        self.wait()

    def _run(self) -> None:
        self._counter.count_thread_as(AHEAD_TIER)
        with contextlib.suppress(AttributeError, OSError):  # threads have priorities of their own on Linux alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        while (plan := self._next()) is not None:
            try:
                self._warm(plan)
            except _ClosingError:
                self._waiting.clear()
            except Exception:
                log.exception("compiling for instance %s failed", plan.name)
                self._not_before[_identity(plan)] = time.monotonic() + RETRY_S

    def _next(self) -> InstancePlan | None:
        """Return the next plan, or None if there is none: the thread ends then."""
        with self._changed:
            if self._waiting and not self._closing.is_set():
                return self._waiting.popleft()
            self._waiting.clear()
            self._thread = None
            self._changed.notify_all()
            return None

    def _warm(self, plan: InstancePlan) -> None:
        compiler = _PatientCompiler(self._saved, self._pause)

        def fuse(program: StageProgram, arguments: tuple) -> None:
            started = time.monotonic()
            self._programs.fused.compile(program, jax.tree.map(abstract, arguments), compiler)
            self._pause(time.monotonic() - started)

        self._visit(plan, compiler, fuse)
        compiler.wait()
        compiler.save()

    def _pause(self, worked: float) -> None:
        """Leave the processor and the interpreter to the steps for as long as they were in use."""
        if self._closing.wait(min(worked, MAX_PAUSE_S)):
            raise _ClosingError

    def _check_fused(self, program: StageProgram, arguments: tuple) -> None:
        if self._programs.fused.find(shared_key(program, arguments)) is None:
            raise _MissingError

    def _visit(
        self, plan: InstancePlan, compiler: StartsCompiling, fuse: Callable[[StageProgram, tuple], None]
    ) -> None:
        """Tell `compiler` all programs that an instance of this plan runs block by block, and `fuse` the fused ones."""
        sizes = self._to.sizes(plan)
        steps = StepCompiler(compiler, self._programs, sizes)
        stages = self._stages(plan)
        steps.compile(stages)
        self._to.moves(plan, compiler)
        for stage, planned in zip(stages, plan.stages, strict=True):
            for layer in self._variants(stage, planned):
                steps.compile_layer(stage.placement, layer)
        if not self._to.fused:
            return
        available = {*self._to.variants, *plan.layer_precisions}
        for fused in (plan, *self._to.foreseen(plan)):
            if available.issuperset(fused.layer_precisions):
                layers = [layer for stage in self._stages(fused) for layer in stage.layers]
                for _, _, program, arguments in steps.fused_stages(stages, layers):
                    fuse(program, arguments)

    def _stages(self, plan: InstancePlan) -> tuple[AbstractStage, ...]:
        stages: list[AbstractStage] = []
        first_layer = 0
        for planned in plan.stages:
            placement = self._placement(planned)
            signatures = {
                b.block: self._programs.builder.signature(b.block, b.precision, placement) for b in planned.blocks
            }
            layers = tuple(signature for block, signature in signatures.items() if is_layer(block))
            stages.append(Stage(placement, signatures.get("embed"), layers, signatures.get("head"), first_layer))
            first_layer += len(layers)
        return tuple(stages)

    def _variants(self, stage: AbstractStage, planned: StagePlan) -> Iterable[BlockSignature]:
        """Return the signatures that layers of a stage may have, one for each kind of layer and precision."""
        builder, model = self._programs.builder, self._programs.builder.config
        layers = {block.block: layer_index(block.block) for block in planned.blocks if is_layer(block.block)}
        kinds = {(model.is_sparse(layer), model.window(layer)): name for name, layer in layers.items()}
        found = (
            builder.signature(name, precision, stage.placement)
            for name in kinds.values()
            for precision in self._to.variants
        )
        return {signature.executable: signature for signature in found}.values()

    def _placement(self, stage: StagePlan) -> Placement:
        return Placement(tuple(self._devices[index] for index in stage.devices))


def _identity(plan: InstancePlan) -> Hashable:
    """Return what the programs of an instance follow from."""
    return tuple((stage.blocks, stage.devices, stage.lanes) for stage in plan.stages)


class _MissingError(Exception):
    """A program is not compiled."""


class _ClosingError(Exception):
    """The engine is being closed."""


class _Present:
    """Looks for programs, and raises `_MissingError` at the first that is not compiled."""

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        if key not in program.executables:
            raise _MissingError
        return program.results[key]


class _PatientCompiler(Compiler):
    """A compiler in the caller's thread, which pauses after every executable."""

    def __init__(self, saved: SavedPrograms, pause: Callable[[float], None]):
        """`pause` is told the seconds that making an executable took."""
        super().__init__(saved)
        self._pause = pause

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        """Compile or load a program, unless it is there, and return the abstract results."""
        started, known = time.monotonic(), key in program.executables
        results = super().compile(program, key, *arguments, static=static)
        if not known:
            self._pause(time.monotonic() - started)
        return results

    def submit(self, function: Callable[..., bool], *arguments: Any) -> Future[bool]:
        """Call a function, and return its result as a future."""
        future: Future[bool] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future
