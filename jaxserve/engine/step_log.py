"""The step log: what an engine did and when, one record a line, for fitting and replaying it in the simulator.

Times are seconds of the engine's clock. A line is a JSON list: the kind of the record, then its fields in order.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.control.controller import Controller
from jaxserve.control.plan import Plan
from jaxserve.control.policy import Policy
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Actuator, Outcome, Transition
from jaxserve.core.errors import ConfigError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work
from jaxserve.engine.core import EngineCore
from jaxserve.telemetry import Snapshot

log = logging.getLogger(__name__)

FORMAT = 1
INTERVAL = 0.1  # s between two looks for what is to be written: short, so that a look holds the interpreter shortly


class Engine(NamedTuple):
    """The first record: what a simulator has to know to be the same engine."""

    format: int
    facts: Mapping[str, Any]


class InForce(NamedTuple):
    """An instance's plan, from its next step on."""

    instance: int
    version: int
    layers: Mapping[str, int]  # by precision
    kv_pages: int  # without the null page


class Step(NamedTuple):
    """A step, when its tokens were there."""

    instance: int
    number: int
    begun: float  # when the scheduler was asked for it
    dispatched: float  # when the device had it
    ended: float  # when the host had its tokens
    tokens: int  # of `StepLoad`, as the next four
    rows: int
    sequences: int
    context: int
    prefill: int
    chunks: int
    prompt_tokens: int  # of the chunks, not padded
    version: int  # of the plan

    @property
    def load(self) -> StepLoad:
        """What it had to compute."""
        return StepLoad(self.tokens, self.rows, self.sequences, self.context, self.prefill)


class Arrival(NamedTuple):
    """A request that an instance has accepted."""

    id: str
    instance: int
    step: int  # the first one to begin after it came
    time: float
    prompt_tokens: int
    max_tokens: int | None
    answers: int  # 0: an embedding
    priority: int


class Answer(NamedTuple):
    """A request's end. Of several answers, the one that ended last."""

    id: str
    instance: int
    first_token: float | None
    last_token: float | None
    tokens: int  # generated
    cached_tokens: int  # of the prompt, found in the prefix cache
    preemptions: int
    reason: str | None


class Tick(NamedTuple):
    """What the controller saw when it looked."""

    time: float
    busy: bool  # whether transitions were under way
    seen: Sequence[Sequence[Any]]  # (time, plan version) of each instance's latest snapshot
    outcomes: Sequence[Sequence[Any]]  # (error or None, seconds) of each transition that had ended since


class Decided(NamedTuple):
    """What the controller decided at a tick."""

    time: float
    policy: str
    reason: str
    before_version: int
    target_version: int
    transitions: Sequence[str]
    outcome: str  # "started", or "rejected: ..."


Record = Engine | InForce | Step | Arrival | Answer | Tick | Decided
KINDS: Mapping[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Engine, InForce, Step, Arrival, Answer, Tick, Decided)
}


# -- writing


class StepLog:
    """A file that records go to, from any thread; a thread of its own writes them."""

    def __init__(self, path: str | Path, facts: Mapping[str, Any]):
        """Overwrites the file. Raises `ConfigError` if it cannot be written."""
        self._waiting: deque[Record] = deque([Engine(FORMAT, facts)])
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  the thread closes it
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror} (step_log)") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-step-log", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Takes a record, and returns at once."""
        self._waiting.append(record)

    def close(self) -> None:
        """Writes what is left and ends the thread. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._file:
                while not self._closing.wait(INTERVAL):
                    self._flush()
                self._flush()
        except OSError:
            log.exception("the step log ends here")
            self._waiting = deque(maxlen=0)

    def _flush(self) -> None:
        waiting = self._waiting
        for _ in range(len(waiting)):
            record = waiting.popleft()
            self._file.write(json.dumps((type(record).__name__.lower(), *record)) + "\n")
        self._file.flush()


class InstanceLog:
    """What a step loop tells the log. For the thread that steps."""

    def __init__(self, log: StepLog, core: EngineCore, buckets: Buckets):
        self._log, self._core, self._loads = log, core, Loads(buckets)
        self._next = 0  # step to begin
        self._version = -1
        self._open: deque[tuple[Any, ...]] = deque()  # of the steps that are dispatched: what is known of them

    def accepted(self, request: Request) -> None:
        """A request has come."""
        params, answers = request.params, 0 if request.embed else request.params.n
        self._log.write(
            Arrival(
                request.id,
                self._core.index,
                self._next,
                request.arrival,
                len(request.prompt_token_ids),
                params.max_tokens,
                answers,
                request.priority,
            )
        )

    def dispatched(self, work: Work, begun: float, now: float) -> None:
        """The device has a step; to be told before the next one begins."""
        plan_fields, load = self._core.plan_fields, self._loads.of(work)
        if plan_fields.plan_version != self._version:
            self._version = plan_fields.plan_version
            layers = dict(plan_fields.layers_by_precision)
            self._log.write(InForce(self._core.index, self._version, layers, plan_fields.kv_pages_total))
        self._open.append((begun, now, load, self._version))
        self._next = work.step + 1

    def ended(self, work: Work, now: float, outputs: Sequence[RequestOutput]) -> None:
        """The oldest step that is dispatched has ended, with what is new of its requests."""
        begun, dispatched, load, version = self._open.popleft()
        self._log.write(
            Step(
                self._core.index,
                work.step,
                begun,
                dispatched,
                now,
                load.tokens,
                load.rows,
                load.sequences,
                load.context,
                load.prefill,
                len(work.chunks),
                work.num_tokens - load.sequences,
                version,
            )
        )
        for output in outputs:
            if output.finished:
                self._log.write(self._answer(work, output))

    def _answer(self, work: Work, output: RequestOutput) -> Answer:
        sequences = (*work.decodes, *(chunk.sequence for chunk in work.chunks))
        last = next(sequence for sequence in sequences if sequence.request.id == output.request_id)
        return Answer(
            output.request_id,
            self._core.index,
            last.first_token,
            last.last_token,
            last.num_generated,
            last.num_cached,
            last.preemptions,
            last.finish_reason,
        )


# -- reading


@dataclass(frozen=True)
class Recording:
    """A step log, read. Everything is in the order in which it was written."""

    facts: Mapping[str, Any]
    steps: tuple[Step, ...] = ()
    plans: tuple[InForce, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    answers: Mapping[str, Answer] = field(default_factory=dict)  # by request
    ticks: tuple[Tick, ...] = ()
    decisions: tuple[Decided, ...] = ()


def read_log(path: str | Path) -> Recording:
    """What a step log says; a last line that was cut off is left out. Raises `ConfigError` naming the line."""
    records: dict[type, list[Any]] = {kind: [] for kind in KINDS.values()}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the step log {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        record = _parsed(line, f"{path}, line {number}")
        records[type(record)].append(record)
    if not records[Engine] or records[Engine][0].format != FORMAT:
        raise ConfigError(f"{path} is no step log of format {FORMAT}")
    return Recording(
        records[Engine][0].facts,
        tuple(records[Step]),
        tuple(records[InForce]),
        tuple(records[Arrival]),
        {answer.id: answer for answer in records[Answer]},
        tuple(records[Tick]),
        tuple(decided._replace(transitions=tuple(decided.transitions)) for decided in records[Decided]),
    )


def _parsed(line: str, where: str) -> Any:
    try:
        kind, *fields = json.loads(line)
        return KINDS[kind](*fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: it is no record of a step log: {line[:80].strip()!r}") from error


class LoggedActuator:
    """An `Actuator` that is another one, and remembers what its controller learnt of it in a tick."""

    def __init__(self, actuator: Actuator):
        self._actuator = actuator
        self.was_busy = False
        self.outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        self.was_busy = self._actuator.busy
        return self.was_busy

    def start(self, transitions: Sequence[Transition]) -> None:
        self._actuator.start(transitions)

    def poll(self) -> Sequence[Outcome]:
        outcomes = self._actuator.poll()
        self.outcomes += outcomes
        return outcomes


class LoggedController(Controller):
    """A controller whose ticks and decisions are logged."""

    def __init__(
        self, log: StepLog, plan: Plan, policy: Policy, resources: Resources, actuator: Actuator, **timing: Any
    ):
        """As `Controller`, with the log first."""
        self._log, self._logged = log, LoggedActuator(actuator)
        super().__init__(plan, policy, resources, self._logged, **timing)

    def tick(self, now: float, snapshots: Sequence[Snapshot]) -> None:
        if now < self._due:
            return
        super().tick(now, snapshots)
        seen = [(snapshot.time, snapshot.plan_version) for snapshot in snapshots]
        outcomes = [(outcome.error, outcome.seconds) for outcome in self._logged.outcomes]
        self._logged.outcomes.clear()
        self._log.write(Tick(now, self._logged.was_busy, seen, outcomes))
        if (decided := decided_at(self, now)) is not None:
            self._log.write(decided)


def decided_at(controller: Controller, now: float) -> Decided | None:
    """What a controller has decided at the tick at `now`, which was its latest one.

    Nothing if the latest entry is done: that is an operator's, as no decision is within its own tick.
    """
    if not controller.decisions or (d := controller.decisions[-1]).time != now or d.outcome == "done":
        return None
    return Decided(now, d.policy, d.reason, d.before_version, d.target_version, d.transitions, d.outcome)
