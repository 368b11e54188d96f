"""A service of instances that join, part, resize and pass requests on, without a model and in one thread."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request, RequestOutput, SequenceStatus
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState, merge
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.scheduler.partition import SideLimits, partition
from jaxserve.telemetry import EngineMetrics, Snapshot
from tests.support.internals import requests_in
from tests.support.paged_device import VOCAB, Letters, PagedDevice

PAGE, TILE = 4, 8
SLOTS, CAPACITY, PAGES, MAX_PAGES = 3, 32, 14, 24  # of an instance with one member
MEMBERS = 4  # at the start
LONGEST = CAPACITY * MEMBERS


@dataclass
class Instance:
    """An instance made of `members` equal ones."""

    members: int
    loop: StepLoop
    device: PagedDevice

    @property
    def core(self) -> EngineCore:
        return self.loop.core

    @property
    def pool(self) -> PagePool:
        return self.loop.core.scheduler.pages


class Service:
    """Instances that come and go, their requests, and a room for requests that none of them can hold."""

    def __init__(self, members: int = MEMBERS, *, pages: int = PAGES, slots: int = SLOTS, capacity: int = CAPACITY):
        self.clock = VirtualClock(1.0)
        self.slots, self.capacity = slots, capacity
        self.min_pages = -(-capacity // PAGE) + 1
        self.max_pages = max(pages, MAX_PAGES)
        self.metrics = EngineMetrics("small")
        self.made = 0
        self.instances = [self.make(1, self.empty_pool(pages), salt="bf16") for _ in range(members)]
        self.ended: list[EngineCore] = []
        self.room: list[RequestState] = []
        self.answers: dict[str, RequestOutput] = {}

    def empty_pool(self, pages: int) -> PagePool:
        return PagePool(pages, min_pages=self.min_pages, max_pages=self.max_pages)

    def make(self, members: int, pool: PagePool, contents: np.ndarray | None = None, *, salt: str) -> Instance:
        table = PageTable(members * self.slots, members * self.capacity // PAGE)
        core = EngineCore(
            Scheduler(SchedulerLimits(members * self.slots, 2, TILE, PAGE), pool, table),
            ModelInfo("small", LONGEST, VOCAB, 1, 0),
            Letters(),
            self.metrics,
            eos_token_ids=(5,),
            plan_fields=Snapshot(),
            index=self.made,
            salt=salt,
            capacity=members * self.capacity,
        )
        self.made += 1
        if contents is None:
            contents = np.full((members * self.max_pages, PAGE), -1, np.int32)
        device = PagedDevice(table, contents)
        return Instance(members, StepLoop(core, device, self.clock), device)

    # -- what the front does

    def add(self, request: Request, which: int = 0) -> None:
        """Give a request to an instance that may be too small for its answers, or even for its prompt."""
        self.instances[which % len(self.instances)].loop.add(request)

    def step(self, which: int = 0) -> None:
        self.clock.advance(1)
        instance = self.instances[which % len(self.instances)]
        if not instance.loop.idle:
            self.take(instance.loop.step())
            self.room += instance.core.take_outgrown()

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.answers[output.request_id] = merge(self.answers.get(output.request_id), output)

    def leave_room(self, which: int = 0) -> None:
        """Send the requests of the room to instances with more capacity than they have tokens, if there are any."""
        staying = []
        for state in self.room:
            tokens = max(len(sequence.tokens) for sequence in state.unfinished_sequences)
            able = [instance for instance in self.instances if instance.core.capacity > tokens]
            if able:
                able[which % len(able)].core.attach([state], None, self.clock.now())
            else:
                staying.append(state)
        self.room = staying

    def abort(self, request_id: str) -> None:
        for instance in self.instances:
            instance.core.abort(request_id, now=self.clock.now())
        self.room = [state for state in self.room if state.request.id != request_id]

    @property
    def cores(self) -> list[EngineCore]:
        """The cores of all instances, of those that have ended too."""
        return [*self.ended, *(instance.core for instance in self.instances)]

    # -- changes of the instances

    def drained(self, instance: Instance, pool: PagePool | None = None) -> list[RequestState]:
        self.take(instance.loop.drain())
        assert not instance.loop.in_flight
        return instance.core.detach()

    def move(self, which: int, to: int, number: int) -> None:
        """Move some requests to another instance, where their KV is computed again."""
        source, target = (self.instances[i % len(self.instances)] for i in (which, to))
        self.take(source.loop.drain())
        chosen = sorted(source.core.request_ids)[: number % 3]
        states = source.core.detach(chosen, keep_pages=False)
        target.core.attach(states, None, self.clock.now())

    def reattach(self, which: int = 0) -> None:
        """Take all requests out and in again, as when a change of the instances fails."""
        instance = self.instances[which % len(self.instances)]
        instance.core.attach(self.drained(instance), lambda page: page, self.clock.now())

    def resize(self, which: int, number: int) -> None:
        instance = self.instances[which % len(self.instances)]
        pool, n = instance.pool, instance.members
        if number % 2:
            instance.core.scheduler.grow(min(n * number, pool.max_pages - pool.num_pages))
        else:
            count = min(n * number, pool.available // n * n, pool.num_pages - pool.min_pages)
            instance.core.scheduler.shrink(count, instance.device.move)

    def join(self, which: int = 0, number: int = 0) -> None:
        """Join two or more instances of one size into one, which keeps the KV of their requests."""
        members = self.instances[which % len(self.instances)].members
        chosen = [instance for instance in self.instances if instance.members == members][: 2 + number % 3]
        n = len(chosen)
        if n == 1:
            return
        size = max(instance.pool.num_pages for instance in chosen)
        for instance in chosen:
            instance.core.scheduler.grow(size - instance.pool.num_pages)
        parts = [self.drained(instance) for instance in chosen]
        pool = PagePool.joined(
            [instance.pool for instance in chosen],
            min_pages=n * members * self.capacity // PAGE + 1,
            max_pages=n * members * self.max_pages,
        )
        contents = np.stack([instance.device.pages for instance in chosen], 1).reshape(-1, PAGE)
        whole = self.make(n * members, pool, contents, salt=chosen[0].core.salt)
        for i, states in enumerate(parts):
            whole.core.attach(states, lambda page, i=i: n * page + i, self.clock.now())
        self.replace(chosen, [whole])

    def part(self, which: int = 0, number: int = 0) -> None:
        """Split an instance into equal ones, which keep the KV of the requests that they get."""
        instance = self.instances[which % len(self.instances)]
        n = instance.members if number % 2 else 2
        if instance.members % n or instance.members == 1:
            return
        core, pool, members = instance.core, instance.pool, instance.members // n
        self.take(instance.loop.drain())
        side_pages = max(pool.num_pages // n - number % 3, members * self.capacity // PAGE + 1)
        if side_pages * n > pool.num_pages:
            return
        requests = core.unfinished
        limits = SideLimits(side_pages, members * self.slots, members * self.capacity)
        result = partition(requests, pool, n, limits)
        self.room += core.detach(result.too_long, keep_pages=False)
        again = core.detach(result.recompute, keep_pages=False)
        states = [*again, *core.detach()]
        result.carry_out(pool, requests, instance.device.move)
        pool.min_pages = n * side_pages
        pool.shrink(pool.num_pages - n * side_pages, instance.device.move)
        pools = pool.parted(n, min_pages=members * self.capacity // PAGE + 1, max_pages=members * self.max_pages)
        contents = instance.device.pages.reshape(-1, n, PAGE)
        made = [self.make(members, part, contents[:, i].copy(), salt=core.salt) for i, part in enumerate(pools)]
        for i, part in enumerate(made):
            mine = [state for state in states if result.sides[state.request.id] == i]
            part.core.attach(mine, lambda page: page // n, self.clock.now())
        self.replace([instance], made)

    def replace(self, gone: list[Instance], new: list[Instance]) -> None:
        for instance in gone:
            core = instance.core
            assert core.idle
            assert core.scheduler.table.free_slots == core.scheduler.limits.max_num_seqs
            assert (core.scheduler.num_waiting, core.scheduler.waiting_tokens) == (0, 0)
            core.close()
            self.ended.append(core)
        self.instances = [each for each in self.instances if each not in gone] + new

    # -- what must hold

    def check(self) -> None:
        for instance in self.instances:
            core, scheduler = instance.core, instance.core.scheduler
            sequences = [s for state in requests_in(core).values() for s in state.unfinished_sequences]
            waiting = [s for s in sequences if s.status is SequenceStatus.WAITING]
            assert scheduler.num_waiting == len(waiting)
            assert scheduler.waiting_tokens == sum(s.num_prompt for s in waiting)
            held = [s for s in waiting if s.parent is not None or s.outgrown]
            assert len([s for s in waiting if s.parent is not None]) <= scheduler.num_deferred <= len(waiting)
            assert scheduler.num_deferred or not held
            running = sorted((s for s in sequences if s.status is SequenceStatus.RUNNING), key=lambda s: s.order)
            assert scheduler.running == running
            assert len({s.slot for s in running}) == len(running)
            for s in running:
                assert scheduler.table.rows[s.slot].tolist()[: len(s.pages)] == s.pages
            references = Counter(page for s in sequences for page in s.pages)
            assert all(instance.pool.references(p) == references[p] for p in range(instance.pool.num_pages))

    def finish(self) -> None:
        """Serve everything, in one instance at the end if a request needs so much."""
        for turn in range(4000):
            if all(instance.loop.idle for instance in self.instances):
                if not self.room:
                    break
                self.leave_room(turn)
                if self.room:
                    self.merge_all()
            self.step(turn)
        else:
            raise AssertionError("the service makes no progress")
        for instance in self.instances:
            assert requests_in(instance.core) == {}
            assert instance.pool.used == 0
            assert instance.core.scheduler.table.free_slots == instance.core.scheduler.limits.max_num_seqs
        self.check()

    def merge_all(self) -> None:
        smallest = min(instance.members for instance in self.instances)
        sizes = [instance.members for instance in self.instances]
        if sizes.count(smallest) > 1:
            self.join(sizes.index(smallest), 0)
        else:  # one is alone with its size
            largest = self.instances[sizes.index(max(sizes))]
            largest.core.scheduler.grow(largest.pool.max_pages - largest.pool.num_pages)
            self.part(self.instances.index(largest), 1)
