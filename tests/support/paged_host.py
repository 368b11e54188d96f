"""A service without a model whose instances merge, split, begin and end by the real procedure, in one thread."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.control.degree_limits import DegreeLimits
from jaxserve.control.diff import diff
from jaxserve.control.groups import grouped_plan, restored_plans
from jaxserve.control.ledger import DeviceLedgers, Ledger
from jaxserve.control.plan import InstancePlan, Plan, PlanInForce, StagePlan, block_chain, parallel_plan
from jaxserve.control.reconfigure import PlanFacts, Reconfiguration
from jaxserve.control.recovery import recovery
from jaxserve.control.regroup import merged_plan, new_names, split_plans, structural_change
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.resources import Resources, validate
from jaxserve.control.service_limits import ServiceLimits
from jaxserve.control.transitions import BetweenSteps, BetweenStepsOf, EachBetweenSteps, Rendezvous, Sleep, Waits
from jaxserve.core.block_names import is_layer
from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import JaxserveError, StageFailed
from jaxserve.core.request import RequestOutput, SequenceStatus
from jaxserve.core.step_shapes import Buckets
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState, merge
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.kvcache import DividedPool, JoinedIds, PagePool, PageTable
from jaxserve.planning.kv_pages import group_limits
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import EngineMetrics, Snapshot
from tests.support.internals import assert_no_record_left, requests_in
from tests.support.paged_device import VOCAB, Letters, PagedDevice
from tests.support.procedures import drive

PAGE, TILE, SLOTS = 4, 8, 2
DEVICES, START, MAX_TP = 8, 6, 4
PAGES, MAX_PAGES = 14, 20  # of an instance on one device
LENGTHS = {1: 32, 2: 80, 4: 176}  # a merged instance is promised more than its members have together
NUM_LAYERS, MAX_LANES = 4, 4
LAYERS = {"float32": 2000, "int4": 300}
GARBAGE = -7


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model with four layers whose parts are equal on all devices."""

    in_place: tuple[str, ...] = ()

    def precisions(self, block: str) -> tuple[str, ...]:
        return tuple(LAYERS) if is_layer(block) else ()

    def block(self, block: str, precision: str, tp: int | None = None) -> int:
        return LAYERS.get(precision, 0) // (tp or 1) if is_layer(block) else 1200 // (tp or 1)

    def page(self, stage: StagePlan) -> int:
        return 40 * sum(is_layer(block.block) for block in stage.blocks) // NUM_LAYERS // stage.tp

    def entries(self, stage: StagePlan) -> Mapping[str, int]:
        weights = sum(self.block(block.block, block.precision, stage.tp) for block in stage.blocks)
        return {"weights": weights, "exchange": 4600}


def machine() -> Resources:
    shapes = Buckets(SLOTS, 2, TILE, 1, (1,))
    degrees = [
        DegreeLimits(tp, length, length // PAGE + 1, tp * MAX_PAGES, tp * PAGES, tp * MAX_PAGES, (), shapes.times(tp))
        for tp, length in LENGTHS.items()
    ]
    degrees += [group_limits(degrees[0], lanes, 2 * lanes * MAX_PAGES) for lanes in range(2, MAX_LANES + 1)]
    budget = NUM_LAYERS * LAYERS["float32"] + 2 * 1200 + 4600 + MAX_PAGES * 40
    return Resources(
        budget, Sizes(), 9, MAX_PAGES, 1e9, page_size=PAGE, degrees=tuple(degrees), shapes=shapes, devices=DEVICES
    )


class Broken(JaxserveError):
    """A failure that a test wants."""


class PagedHost:
    """Instances that keep their pages in arrays (`InstanceHost`). `before` is called with the name of each action."""

    def __init__(self, service: "PagedService"):
        self._service = service
        self.instances: dict[str, StepLoop] = {}
        self.alive: list[StepLoop] = []  # made, and neither ended nor undone
        self.before: Callable[[str], None] = lambda action: None
        self.layers_held = 0  # loads of layers for members that are not given up

    def instance(self, name: str) -> StepLoop:
        return self.instances[name]

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return self._service.engine.failed

    def abandon(self, instance: StepLoop, lost: Collection[int]) -> None:
        self.before("abandon")
        pages_of(instance)[:] = GARBAGE

    def make(self, plan: InstancePlan, pool: PagePool, contents: np.ndarray) -> StepLoop:
        made = self._service.loop(plan, pool, contents)
        self.alive.append(made)
        return made

    def stage(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[Mapping[str, Any]]:
        yield from ()
        self.before("stage")
        return {plan.name: empty(plan) for plan in plans}

    def discard(self, staged: Mapping[str, Any]) -> None:
        pass

    def open(self, plan: InstancePlan, staged: Any, undo: ExitStack) -> StepLoop:
        self.before("open")
        return self._made(plan, empty_pool(plan), staged, undo)

    def _made(self, plan: InstancePlan, pool: PagePool, contents: np.ndarray, undo: ExitStack) -> StepLoop:
        steps = self.make(plan, pool, contents)
        undo.callback(self._end, steps)
        return steps

    def _end(self, steps: StepLoop) -> None:
        steps.core.metrics.end()
        self.alive.remove(steps)

    def merge(self, members: Sequence[StepLoop], plan: InstancePlan, pages: PagePool, undo: ExitStack) -> StepLoop:
        self.before("merge")
        contents = np.stack([pages_of(member) for member in members], 1).reshape(-1, PAGE)
        groups = {page // len(members) for page in pages.occupied}
        for group in set(range(len(contents) // len(members))) - groups:  # nothing is exchanged there
            contents[group * len(members) : (group + 1) * len(members)] = GARBAGE
        made = self._made(plan, pages, contents, undo)
        self.before("merged")
        return made

    def split(
        self, whole: StepLoop, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> list[StepLoop]:
        contents, made = pages_of(whole).reshape(-1, len(plans), PAGE), []
        for index, (plan, pool) in enumerate(zip(plans, pages, strict=True)):
            self.before("split")
            made.append(self._made(plan, pool, contents[:, index].copy(), undo))
        return made

    # -- instances that share their layers

    def stage_layers(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[str]:
        yield Sleep(0.0)
        self.before("stage layers")
        self.layers_held += 1
        return "layers"

    def discard_layers(self, staged: Any) -> None:
        self.layers_held -= staged is not None

    def drop(
        self, members: Sequence[StepLoop], trades: Any, plan: InstancePlan, pages: PagePool, undo: ExitStack
    ) -> StepLoop:
        self.before("drop")
        ids = JoinedIds(tuple(self._service.plan.instance(member.core.name).lanes for member in members))
        contents = empty(plan)
        for index, member in enumerate(members):
            for page, own in enumerate(pages_of(member)[: member.core.scheduler.pages.num_pages]):
                contents[ids.joined(index, page)] = own
        made = self._made(plan, pages, contents, undo)
        self._away(made, {page // plan.lanes for page in pages.occupied}, plan.lanes)
        self.before("dropped")
        return made

    def restore(
        self,
        whole: StepLoop,
        trades: Any,
        plans: Sequence[InstancePlan],
        pages: Sequence[PagePool],
        undo: ExitStack,
    ) -> list[StepLoop]:
        contents, made = pages_of(whole).reshape(-1, len(plans), PAGE), []
        rows = {page for pool in pages for page in pool.occupied}
        for index, (plan, pool) in enumerate(zip(plans, pages, strict=True)):
            self.before("restore")
            own = contents[: len(empty(plan)), index].copy()
            made.append(self._made(plan, pool, own, undo))
            self._away(made[-1], rows, 1)
        return made

    def _away(self, steps: StepLoop, rows: Collection[int], lanes: int) -> None:
        """Let pages of an instance have their contents only after they were exchanged."""
        contents, steps.lanes = pages_of(steps), lanes  # type: ignore[attr-defined]
        steps.away = contents.copy()  # type: ignore[attr-defined]
        for row in rows:
            contents[row * lanes : (row + 1) * lanes] = GARBAGE

    def send(self, instances: Sequence[Any], index: int, rows: Sequence[int]) -> Any:
        self.before("send")
        steps = instances[index]
        return {p: steps.away[p].copy() for r in rows for p in range(r * steps.lanes, (r + 1) * steps.lanes)}

    def arrival(self, sent: Sequence[Any]) -> Waits[None]:
        yield Sleep(0.0)
        self.before("arrival")

    def receive(self, instances: Sequence[Any], index: int, sent: Sequence[Any]) -> None:
        self.before("receive")
        for page, contents in sent[index].items():
            pages_of(instances[index])[page] = contents

    def end_exchange(self, instances: Sequence[Any]) -> None:
        for steps in instances:
            del steps.away

    # -- merges and splits layer by layer (`GradualHost`): the layers of this model keep nothing

    def begin_apart(
        self,
        members: Sequence[StepLoop],
        plan: InstancePlan,
        plans: Sequence[InstancePlan],
        pages: DividedPool,
        undo: ExitStack,
    ) -> StepLoop:
        self.before("begin apart")
        contents = np.stack([pages_of(member) for member in members], 1).reshape(-1, PAGE)
        made = self._made(plan, pages, contents, undo)
        self.before("begun apart")
        return made

    def know_members(self, instance: StepLoop, plan: InstancePlan, plans: Sequence[InstancePlan]) -> None:
        self.before("know members")

    def load_layers(self, instance: StepLoop, layers: Sequence[str], *, joint: bool) -> Waits[Any]:
        yield Sleep(0.0)
        self.before("load layers")
        return layers

    def change_layers(self, instance: StepLoop, loaded: Any) -> Any:
        self.before("change layers")
        return loaded

    def free_layers(self, replaced: Any) -> None:
        pass

    def end_apart(
        self, instance: StepLoop, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> list[StepLoop]:
        return self.split(instance, plans, pages, undo)

    def leave(self, requests: Sequence[RequestState]) -> None:
        self._service.engine.place(requests)

    # -- pages

    def move_pages(self, instance: StepLoop, moves: Mapping[int, int]) -> None:
        self.before("move pages")
        instance.executor.move(dict(moves))

    def copy_pages(self, source: StepLoop, target: StepLoop, pages: Mapping[int, int]) -> None:
        self.before("copy pages")
        pages_of(target)[list(pages.values())] = pages_of(source)[list(pages)]

    def replace(self, before: Collection[str], after: Mapping[str, StepLoop], homeless: Sequence[RequestState]) -> None:
        self.before("replace")
        self._service.engine.replace(before, after, homeless)
        self.instances = {name: steps for name, steps in self.instances.items() if name not in before} | dict(after)

    def release(self, ended: Sequence[StepLoop]) -> Waits[None]:
        yield from ()
        for steps in ended:
            assert steps.core.idle
            self.alive.remove(steps)
        self.before("release")


class PagedInstance:
    """An instance as its own transitions see it (`RunningInstance`)."""

    def __init__(self, steps: StepLoop):
        self.steps = steps

    @property
    def core(self) -> EngineCore:
        return self.steps.core

    def use(self, plan: InstancePlan) -> None:
        pass

    def prepare_layer(self, block: str, precision: str, size: int, seconds: float) -> Waits[str]:
        yield from ()
        return block

    def prepare_segments(self, pages: int) -> Waits[None]:
        yield from ()

    def free_layers(self, layers: Sequence[str]) -> None:
        pass

    def free_segments(self, segments: None) -> None:
        pass

    def pages_moved(self, moves: Mapping[int, int], seconds: float) -> Waits[None]:
        yield from ()

    def replace_layers(self, layers: Sequence[str]) -> Sequence[str]:
        return layers

    def hold_layer(self, block: str, precisions: Sequence[str]) -> Waits[None]:
        yield from ()

    def exchange_layer(self, block: str, precision: str, seconds: float) -> None:
        pass

    def extend_pools(self, segments: None) -> None:
        pass

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        self.steps.executor.move(dict(moves))
        pages_of(self.steps)[pages:] = GARBAGE


class PagedService:
    """The front, the instances and the plan of a service that a test changes between any two steps."""

    def __init__(self) -> None:
        self.clock, self.metrics, self.resources = VirtualClock(1.0), EngineMetrics("small"), machine()
        chain = block_chain("float32", ["float32"] * NUM_LAYERS, "float32")
        self.in_force = PlanInForce(parallel_plan(chain, kv_pages=PAGES, tp=1, pp=1, dp=START, devices=DEVICES))
        ledgers = {device: Ledger(self.resources.budget) for device in range(DEVICES)}
        self.ledgers = DeviceLedgers({0: ledgers.pop(0)}, ledgers)
        for plan in self.plan.instances:
            self.ledgers.update(plan.name, self.resources.device_entries(plan))
        self.host = PagedHost(self)
        self.info = ModelInfo("small", LENGTHS[MAX_TP], VOCAB, 1, 0, max_queued_requests=10_000)
        for plan in self.plan.instances:
            self.host.instances[plan.name] = self.host.make(plan, empty_pool(plan), empty(plan))
        limits = ServiceLimits(self.in_force, self.resources, lambda: None)
        self.engine = SyncEngine(
            self.host.instances,
            self.info,
            Letters(),  # type: ignore[arg-type]
            self.clock,
            route=limits.route,
            max_model_len=lambda: LENGTHS[MAX_TP],
        )
        self.in_force.follow(self.engine.reroute)
        self.facts = PlanFacts(lambda plan, version: Snapshot(kv_pages_total=plan.kv_pages - 1, plan_version=version))
        self.regrouping = Regrouping(
            self.host,
            self.in_force,
            self.resources,
            self.ledgers,
            self.resources.device_entries,
            self.facts,
            self.clock.now,
        )
        self.start = self.plan.instances[0]
        self.meanwhile: Callable[[], None] = self.step
        self.answers: dict[str, RequestOutput] = {}
        self.regroups = Counter[str]()
        self.names: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.in_force.plan

    def loop(self, plan: InstancePlan, pool: PagePool, contents: np.ndarray) -> StepLoop:
        limits = self.resources.limits_of(plan.tp, plan.lanes)
        slots, width = limits.slots, -(-limits.max_len // PAGE)
        table = PageTable(slots, width)
        scheduler = Scheduler(SchedulerLimits(slots, 2, TILE, PAGE), pool, table)
        core = EngineCore(
            scheduler,
            self.info,
            Letters(),  # type: ignore[arg-type]
            self.metrics,
            eos_token_ids=(5,),
            plan_fields=Snapshot(),
            name=plan.name,
            capacity=limits.max_len,
        )
        return StepLoop(core, PagedDevice(table, contents), self.clock)

    # -- requests

    def step(self) -> None:
        self.clock.advance(1)
        for output in self.engine.step():
            self.answers[output.request_id] = merge(self.answers.get(output.request_id), output)

    def finish(self) -> None:
        """Serve all requests to their end; merge instances if some need that."""
        for turn in range(5000):
            if self.engine.idle:
                return
            if turn % 20 == 19 and self.engine.waiting_room().count:
                with contextlib.suppress(ValueError):  # more pages are in use than the parts would have
                    self.make_room()
            self.step()
        raise AssertionError("the service makes no progress")

    def make_room(self) -> None:
        """Merge instances of the smallest degree, or split the largest one if there is only one of these."""
        by_degree: dict[int, list[str]] = {}
        for plan in self.plan.instances:
            if plan.lanes > 1:
                self.change(self.restored(plan.name))
                return
            by_degree.setdefault(plan.tp, []).append(plan.name)
        for degree in sorted(by_degree):
            if degree < MAX_TP and len(by_degree[degree]) > 1:
                self.change(self.merged(by_degree[degree][:2]))
                return
        if MAX_TP not in by_degree:
            self.change(self.added())

    # -- plans

    def merged(self, names: Sequence[str], precisions: Mapping[str, str] | None = None) -> Plan:
        members = [self.plan.instance(name) for name in names]
        whole = merged_plan(members, *self.new_names(1)).with_precisions(precisions or members[0].precisions)
        least = self.resources.limits_of(whole.tp).min_pages
        return self.without(names, [whole.with_kv_pages(max(whole.kv_pages, least))])

    def split(self, name: str, count: int) -> Plan:
        whole = self.plan.instance(name)
        least = self.resources.limits_of(whole.tp // count).min_pages
        whole = whole.with_kv_pages(max(whole.kv_pages // count, least) * count)
        return self.without([name], split_plans(whole, self.new_names(count)))

    def grouped(self, names: Sequence[str], pages: int) -> Plan:
        members = [self.plan.instance(name) for name in names]
        whole = grouped_plan(members, *self.new_names(1), self.resources)
        most = self.resources.kv_capacity(whole) // whole.lanes * whole.lanes
        wanted = max(whole.kv_pages, pages // whole.lanes * whole.lanes)
        return self.without(names, [whole.with_kv_pages(min(wanted, most))])

    def restored(self, name: str, pages: int = PAGES) -> Plan:
        whole = self.plan.instance(name)
        return self.without([name], restored_plans(whole, self.new_names(whole.lanes), self.start, pages))

    def added(self, index: int = 0) -> Plan:
        free = sorted(set(range(DEVICES)) - {d for plan in self.plan.instances for d in plan.devices})
        stage = replace(self.start.stages[0], devices=(free[index % len(free)],), kv_pages=PAGES)
        return self.without([], [InstancePlan((stage,), *self.new_names(1))])

    def without(self, names: Collection[str], new: Sequence[InstancePlan] = ()) -> Plan:
        kept = [plan for plan in self.plan.instances if plan.name not in names]
        return Plan(self.plan.version + 1, (*kept, *new))

    def new_names(self, count: int) -> tuple[str, ...]:
        self.names = new_names(self.plan, count, self.names)
        return self.names

    # -- changes

    def change(self, wanted: Plan, *, gradual: bool = False) -> None:
        """Put a plan in force. Raise what made that fail; the parts before it are in force.

        With `gradual`, instances merge and split layer by layer, and `meanwhile` is called between layers.
        """
        self.regrouping = replace(self.regrouping, longest_stop=-1.0 if gradual else math.inf)
        change = structural_change(self.plan, wanted, self.resources)
        validate(wanted, self.resources, self.plan.instances)
        before = self.plan
        try:
            self._adapt(change.align)
            self._drive(lambda report: self.regrouping.carry_out(change.regroups, report))
        except Exception:
            with contextlib.suppress(ValueError):
                self._adapt({name: before.instance(name) for name in change.align if name in self.host.instances})
            raise
        for regroup in change.regroups:
            self.regroups[f"{len(regroup.before)} -> {len(regroup.after)}"] += 1
        self._adapt(change.finish)

    def break_soon(self, name: str, stage: int | None) -> Callable[[], None]:
        """Let the next step of an instance fail, at a stage or in the host. Return what ends that."""
        executor, error = (
            self.host.instance(name).executor,
            StageFailed(stage, Broken()) if stage is not None else Broken(),
        )

        def execute(*_: object) -> None:
            raise error

        executor.execute = execute  # type: ignore[method-assign]
        self.engine.recover_by(lambda name: True)
        return lambda: executor.__dict__.pop("execute", None)

    def recover(self) -> None:
        """Let others go on for the instances that have failed."""
        for name, error in self.engine.failed.items():
            if len(self.plan.instances) == 1 and self.plan.instance(name).lanes == 1:
                self.change(self.added())  # all others have ended meanwhile
            start, names = Plan(0, (self.start,)), (*self.in_force.used_names, *self.names)
            regroup = recovery(self.plan, name, error, start, self.resources, names)
            self._drive(lambda report, r=regroup: self.regrouping.carry_out((r,), report))
            self.regroups[f"{'group' if regroup.after else 'instance'} fails"] += 1

    def _adapt(self, plans: Mapping[str, InstancePlan]) -> None:
        for name, plan in plans.items():
            transitions = diff(self.plan.instance(name), plan, self.resources)
            instance = PagedInstance(self.host.instance(name))
            procedure = Reconfiguration(
                name,
                instance,  # type: ignore[arg-type]
                self.in_force,
                self.ledgers,
                self.resources.device_entries,
                self.facts,
                self.clock.now,
            )
            self._drive(lambda report, p=procedure, t=transitions: p.carry_out(t, report))

    def _drive(self, start: Callable[[Any], Waits[None]]) -> None:
        errors: list[Exception] = []
        drive(start(lambda outcome, error: errors.extend([error] if error else [])), self._wait)
        if errors:
            raise errors[0]

    def _wait(self, wait: Any) -> None:
        if isinstance(wait, Rendezvous):
            with self.engine.stopped(wait.instances):
                wait.function()
        elif isinstance(wait, EachBetweenSteps):
            self.meanwhile()
            for function in wait.functions.values():
                function()
        elif isinstance(wait, BetweenSteps):
            if isinstance(wait, BetweenStepsOf):
                self.meanwhile()
            wait.function()
        else:  # steps of other requests go on
            self.meanwhile()

    # -- what must hold

    def check(self) -> None:
        assert set(self.host.instances) == set(self.engine.loops) == {plan.name for plan in self.plan.instances}
        assert self.host.layers_held == 0
        assert sorted(map(id, self.host.alive)) == sorted(map(id, self.host.instances.values()))
        entries = self.resources.device_entries(*self.plan.instances)
        for device, ledger in self.ledgers.items():
            assert {name: size for name, size in ledger.entries.items() if size} == entries.get(device, {})
        for name, steps in self.host.instances.items():
            scheduler, pool = steps.core.scheduler, steps.core.scheduler.pages
            assert pool.num_pages == self.plan.instance(name).kv_pages
            sequences = [s for state in requests_in(steps.core).values() for s in state.unfinished_sequences]
            running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
            assert len({s.slot for s in running}) == len(running) == len(scheduler.running)
            assert scheduler.table.free_slots == scheduler.limits.max_num_seqs - len(running)
            assert not pool.away
            references = Counter(page for s in sequences for page in s.pages)
            assert all(pool.references(page) == references[page] for page in range(pool.num_pages))

    def check_idle(self) -> None:
        self.check()
        assert self.engine.idle
        assert_no_record_left(self.engine)
        assert all(not steps.core.request_ids for steps in self.host.instances.values())
        assert all(steps.core.scheduler.pages.used == 0 for steps in self.host.instances.values())
        assert all(steps.core.snapshot.kv_pages_used == 0 for steps in self.host.instances.values())


def empty(plan: InstancePlan) -> np.ndarray:
    pages = plan.tp * MAX_PAGES if plan.lanes == 1 else 2 * plan.lanes * MAX_PAGES
    return np.full((pages, PAGE), GARBAGE, np.int32)


def empty_pool(plan: InstancePlan) -> PagePool:
    return PagePool(plan.kv_pages, min_pages=LENGTHS[plan.tp] // PAGE + 1, max_pages=plan.tp * MAX_PAGES)


def pages_of(steps: StepLoop) -> np.ndarray:
    return steps.executor.pages  # type: ignore[attr-defined]
