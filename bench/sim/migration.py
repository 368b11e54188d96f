"""Migration of requests between instances for balance, after Llumnix, for comparison: jaxserve does not move them.

Where a request lacks pages, or where few are left, a running sequence moves to the instance with most free pages. Its
pages are copied while it goes on, and it stops between two steps alone. A waiting request, which has no pages, moves
at once to an instance that has room for it. Copies do not slow the devices down. All of that is in favour of migration.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import inf

from jaxserve.core.clock import VirtualClock
from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence, SequenceStatus
from jaxserve.sim.build import BuiltSimulation
from jaxserve.sim.front import SimFront
from jaxserve.sim.hardware import Link
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.simulation import Frontend, Simulation

INTERVAL = 0.1  # s
LOW = 0.05  # share of the pages of an instance that are free, below which sequences are moved away
AHEAD = 3.0  # a target has at least this many times the room of the source


@dataclass(eq=False)
class _Move:
    """A sequence whose pages are being copied into pages that the target has set aside."""

    sequence: Sequence
    source: SimInstance
    target: SimInstance
    pages: list[int]
    end: float  # s


class Migration:
    """A source of events (`simulation.Control`) that moves requests between instances."""

    def __init__(self, front: SimFront, clock: VirtualClock, link: Link, page_bytes: int):
        self.moved = 0
        """Running sequences that have moved."""
        self.moved_waiting = 0
        """Waiting sequences that have moved."""
        self._front, self._clock, self._link, self._page_bytes = front, clock, link, page_bytes
        self._due = clock.now()
        self._moves: list[_Move] = []
        self._ready: list[_Move] = []  # whose source has stopped

    # -- as `simulation.Control`

    def next_event(self) -> float:
        copied = min((move.end for move in self._moves), default=inf)
        return self._clock.now() if self._ready else min(self._due, copied)

    def advance(self) -> None:
        now = self._clock.now()
        ready, self._ready = self._ready, []
        for move in ready:
            self._switch(move)
        for move in [move for move in self._moves if move.end <= now]:
            self._moves.remove(move)
            move.source.stop(partial(self._stopped, move))
        if now >= self._due:
            self._due = now + INTERVAL
            for instance in self._front.instances.values():
                instance.snapshot()  # completes a steady run up to now
            self._move_waiting()
            self._relieve()

    # -- waiting requests

    def _move_waiting(self) -> None:
        """Move requests that wait to instances that have room for them now."""
        for source in self._front.instances.values():
            if not source.core.scheduler.num_waiting:
                continue
            for request_id, sequences in source.core.unfinished.items():
                sequence = sequences[0]
                if sequence.status is not SequenceStatus.WAITING or sequence.num_inflight:
                    continue
                need = self._pages_for(sequence)
                target = max(self._front.instances.values(), key=_room)
                if _room(target) < need or _room(target) - need <= _room(source):
                    continue  # it would not start there, or there would be no better than here
                _interrupt(source)
                _interrupt(target)
                target.core.attach(source.core.detach([request_id]), None, self._clock.now())
                self._follow(source, target)
                self.moved_waiting += 1

    def _pages_for(self, sequence: Sequence) -> int:
        return ceil_div(len(sequence.tokens), self._page_size) + 1

    @property
    def _page_size(self) -> int:
        return next(iter(self._front.instances.values())).core.scheduler.limits.page_size

    # -- running ones

    def _relieve(self) -> None:
        """Begin to move a sequence away from each instance that lacks pages, to the instance with most room."""
        busy = {move.source for move in self._moves} | {move.target for move in self._moves}
        busy |= {instance for move in self._ready for instance in (move.source, move.target)}
        able = [each for each in self._front.instances.values() if each not in busy and not each.stopping]
        for source in sorted(able, key=_room):
            targets = [each for each in able if each is not source and each not in busy]
            if source in busy or not targets or not _lacks_pages(source):
                continue
            target = max(targets, key=_room)
            room = _room(target)
            if room < AHEAD * max(1, _room(source)):
                continue
            fitting = [s for s in source.core.scheduler.running if s.decoding and len(s.pages) + 1 < room / 2]
            if fitting and target.core.scheduler.table.free_slots:
                self._begin(max(fitting, key=lambda s: len(s.pages)), source, target)
                busy |= {source, target}

    def _begin(self, sequence: Sequence, source: SimInstance, target: SimInstance) -> None:
        pages = target.core.scheduler.pages.allocate(len(sequence.pages))
        seconds = self._link.seconds(len(pages) * self._page_bytes)
        self._moves.append(_Move(sequence, source, target, pages, self._clock.now() + seconds))

    def _stopped(self, move: _Move) -> None:
        self._ready.append(move)

    def _switch(self, move: _Move) -> None:
        """Let a sequence go on at its target, with no token in flight, unless it has ended or lost its pages."""
        source, target, sequence = move.source, move.target, move.sequence
        _interrupt(target)
        theirs, ours = target.core.scheduler, source.core.scheduler
        lacking = len(sequence.pages) - len(move.pages)
        there = sequence.status is SequenceStatus.RUNNING and sequence.request.id in source.core.request_ids
        if there and 0 <= lacking <= theirs.pages.available - len(theirs.running) and theirs.table.free_slots:
            old, new = list(sequence.pages), move.pages + theirs.pages.allocate(lacking)
            states = source.core.detach([sequence.request.id])
            target.core.attach(states, dict(zip(old, new, strict=True)).__getitem__, self._clock.now())
            ours.pages.release(old)
            self._follow(source, target)
            self.moved += 1
        else:
            theirs.pages.release(move.pages)
        source.go_on()

    def _follow(self, *instances: SimInstance) -> None:
        ids = {instance.core.name: tuple(instance.core.request_ids) for instance in instances}
        on_the_way, lost = self._front.directory.moved(self._front.instances, ids)
        assert not on_the_way, "no instance has ended"
        assert not lost, [entry.request.id for entry in lost]


def _interrupt(instance: SimInstance) -> None:
    """End a steady run of an instance with the step that computes now, because its requests change."""
    instance.call(lambda: None)
    instance.snapshot()


def _room(instance: SimInstance) -> int:
    """Return the pages that an instance has for further requests; less than 0 if it has too few for those it has."""
    scheduler, core = instance.core.scheduler, instance.core
    waiting = ceil_div(scheduler.waiting_tokens, scheduler.limits.page_size) + scheduler.num_waiting
    return scheduler.pages.available - len(core.scheduler.running) - waiting


def _lacks_pages(instance: SimInstance) -> bool:
    pages = instance.core.scheduler.pages
    return instance.core.scheduler.num_waiting > 0 or pages.available < LOW * pages.capacity


def with_migration(
    built: BuiltSimulation, link: Link, page_bytes: int, frontend: Frontend
) -> tuple[BuiltSimulation, Migration]:
    """Return a simulation of the same instances, which moves requests between them over a link."""
    front = built.simulation.front
    clock = next(iter(front.instances.values())).clock
    assert isinstance(clock, VirtualClock)
    control = Migration(front, clock, link, page_bytes)
    return replace(built, simulation=Simulation(front, clock, frontend=frontend, control=control)), control
