"""Fakes for tests of policies and controllers: a machine, an actuator with its own clock, and a fluid engine."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.control import Outcome, Plan, Resources, SizeTable, SwapPrecision, Transition, block_chain, parallel_plan
from jaxserve.control.policies import MorphSettings
from jaxserve.telemetry import Recent, Snapshot
from jaxserve.telemetry.metrics import TIME_BOUNDS

MB = 1_000_000
LAYER = {"bfloat16": 20 * MB, "int8": 10 * MB, "int4": 5 * MB}
PAGE = MB // 2  # of all layers
TO_INT4 = MorphSettings(entry_interval=0.5, most_layers=0.75, rest="")  # three quarters of the layers, and no further


def machine(
    layers: int = 16,
    *,
    home_pages: int = 401,
    max_pages: int = 2000,
    pp: int = 1,
    segments: tuple[int, ...] = (),
    in_place: tuple[str, ...] = (),
) -> Resources:
    """Return devices on which `home_pages` pages fit next to layers in full precision, spread evenly over stages."""
    each, page = layers // pp, PAGE // layers
    first = ("embed", *(f"layers.{each * stage}" for stage in range(1, pp)))
    return Resources(
        budget=100 * MB + each * LAYER["bfloat16"] + home_pages * each * page,
        sizes=SizeTable(
            layers={(f"layers.{n}", precision): size for n in range(layers) for precision, size in LAYER.items()},
            fixed=dict.fromkeys(first, 100 * MB),
            pages={f"layers.{n}": page for n in range(layers)},
            in_place=in_place,
        ),
        min_pages=17,
        max_pages=max_pages,
        copy_rate=1000 * MB,
        segments=segments,
    )


def home_plan(layers: int = 16, *, pages: int = 401, pp: int = 1, dp: int = 1) -> Plan:
    chain = block_chain("bfloat16", ["bfloat16"] * layers, "bfloat16")
    return parallel_plan(chain, kv_pages=pages, tp=1, pp=pp, dp=dp, devices=pp * dp)


def snapshot(time: float = 0.0, *, recent: Recent | None = None, pages: int = 400, **values: object) -> Snapshot:
    """Return a snapshot whose recent past is empty unless `recent` is given."""
    past = Recent(5.0, 0.0, 0.0, 0.0, 0.0, 0, None, None, 0.0, 0.0, 0.0, 0.0) if recent is None else recent
    return Snapshot(time=time, recent=past, kv_pages_total=pages, **values)  # type: ignore[arg-type]


class VirtualActuator:
    """An actuator whose transitions take their stated seconds, and fail where `error_of` returns an error."""

    def __init__(self, error_of: Callable[[Transition], str | None] = lambda _: None):
        self.now = 0.0
        self.error_of = error_of
        self.started: list[Sequence[Transition]] = []
        self._queue: deque[tuple[float, Transition]] = deque()
        self._outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        self._advance()
        return bool(self._queue)

    def start(self, transitions: Sequence[Transition]) -> None:
        assert not self.busy
        self.started.append(transitions)
        end = self.now
        for transition in transitions:
            end += transition.seconds
            self._queue.append((end, transition))

    def poll(self) -> Sequence[Outcome]:
        self._advance()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _advance(self) -> None:
        while self._queue and self._queue[0][0] <= self.now:
            _, transition = self._queue.popleft()
            error = self.error_of(transition)
            self._outcomes.append(Outcome(transition, error, transition.seconds))
            if error is not None:
                self._queue.clear()


@dataclass
class Fluid:
    """An engine as a fluid: sequences arrive at a rate, wait for pages and slots, run, and leave.

    Layers in fewer bits make all of it faster, up to the factor `speedup` if all layers are.
    """

    max_seqs: int = 64
    pages_each: int = 10
    seconds_each: float = 5.0  # of service in full precision
    tokens_each: int = 100
    speedup: float = 1.6
    queue: deque[list[float]] = field(default_factory=deque)  # [time of arrival, sequences]
    waiting: float = 0.0
    running: float = 0.0
    finished: float = 0.0
    ttft: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS) + 1))

    def capacity(self, pages: int) -> float:
        """Return the sequences per second that full precision can serve with `pages` pages."""
        return min(self.max_seqs, (pages - 1) / self.pages_each) / self.seconds_each

    def step(self, now: float, seconds: float, rate: float, plan: Plan) -> Snapshot:
        """Advance the state by `seconds`, and return the snapshot afterwards."""
        instance = plan.instances[0]
        share = sum(p != "bfloat16" for p in instance.layer_precisions) / len(instance.layer_precisions)
        done = min(self.running, self.running / self.seconds_each * (1 + (self.speedup - 1) * share) * seconds)
        self.running -= done
        self.finished += done
        if rate > 0:
            self.queue.append([now, rate * seconds])
            self.waiting += rate * seconds
        room = max(0.0, min(self.max_seqs, (instance.kv_pages - 1) / self.pages_each) - self.running)
        while self.queue and room > 0:
            taken = min(room, self.queue[0][1])
            self.queue[0][1] -= taken
            self.running, self.waiting, room = self.running + taken, max(0.0, self.waiting - taken), room - taken
            if self.queue[0][1] <= 1e-9:
                self.queue.popleft()
        waits = bool(self.queue) and self.waiting >= 0.5
        return Snapshot(
            time=now,
            num_running=round(self.running),
            num_waiting=max(1, round(self.waiting)) if waits else 0,
            oldest_wait=now - self.queue[0][0] if waits else 0.0,
            kv_pages_total=instance.kv_pages - 1,
            kv_pages_used=min(instance.kv_pages - 1, round(self.running * self.pages_each)),
            finished=int(self.finished),
            generated_tokens=int(self.finished * self.tokens_each),
        )


def swaps(transitions: Sequence[Transition], precision: str) -> list[str]:
    """Return the blocks that change to a precision."""
    return [t.block for t in transitions if isinstance(t, SwapPrecision) and t.after == precision]
