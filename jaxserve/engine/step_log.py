"""The step log: a file of an engine's steps, requests and decisions, which the simulator fits and replays.

Times are seconds of the engine's clock. Each line is a JSON list: the kind of a record, then its fields in order.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.control.costs import MeasuredCosts
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.resources import Resources
from jaxserve.control.stage_sizes import SizeTable
from jaxserve.core.block_names import is_layer
from jaxserve.core.errors import ConfigError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work
from jaxserve.engine.core import EngineCore

log = logging.getLogger(__name__)

FORMAT = 1
# Seconds between two writes. It is short, so that each write holds the interpreter's lock for a short time.
INTERVAL = 0.1


class Engine(NamedTuple):
    """The first record of a log: the facts from which a simulator builds the same engine."""

    format: int
    facts: Mapping[str, Any]


class CostsRecord(NamedTuple):
    """The step times that the policy was told."""

    table: Mapping[str, Any]  # `MeasuredCosts.to_dict`


class PlanRecord(NamedTuple):
    """The plan that an instance has from its next step on."""

    instance: int
    version: int
    layers: Mapping[str, int]  # by precision
    kv_pages: int  # without the null page


class Step(NamedTuple):
    """A step that has ended. Times are seconds."""

    instance: int
    number: int
    begun: float  # time at which it was scheduled
    dispatched: float  # time at which the device had it
    ended: float  # time at which the host had its tokens
    tokens: int  # field of `StepLoad`
    rows: int  # field of `StepLoad`
    sequences: int  # field of `StepLoad`
    context: int  # field of `StepLoad`
    prefill: int  # field of `StepLoad`
    chunks: int
    prompt_tokens: int  # tokens of the chunks without padding
    version: int  # version of the plan
    tiles: int = 0  # of the chunks, without those that the step is padded with

    @property
    def load(self) -> StepLoad:
        """The load that the step computed."""
        return StepLoad(self.tokens, self.rows, self.sequences, self.context, self.prefill)


class InstanceRecord(NamedTuple):
    """An instance that has begun. Other records have its number."""

    instance: int
    name: str


class RegroupRecord(NamedTuple):
    """A regroup that has ended, by the names of instances. Those of `before` have ended, unless it has failed."""

    time: float  # s, of the tick at which the controller learnt of it
    before: Sequence[str]
    after: Sequence[Sequence[Any]]  # (name, devices of each stage, KV pages) of each new instance
    error: str | None
    seconds: float


class MovedRecord(NamedTuple):
    """A request that has come from another instance."""

    id: str
    instance: int
    step: int  # number of the first step with it in this instance


class Arrival(NamedTuple):
    """A request that an instance has accepted."""

    id: str
    instance: int
    step: int  # number of the first step scheduled after its arrival
    time: float
    prompt_tokens: int
    max_tokens: int | None
    answers: int  # 0 for an embedding request
    priority: int


class AnswerRecord(NamedTuple):
    """The end of a request: the fields of its answer that ended last."""

    id: str
    instance: int
    first_token: float | None
    last_token: float | None
    tokens: int  # generated tokens
    cached_tokens: int  # prompt tokens found in the prefix cache
    preemptions: int
    reason: str | None


class Tick(NamedTuple):
    """The controller's observations at a tick."""

    time: float
    busy: bool  # whether transitions were in progress
    seen: Sequence[Sequence[Any]]  # (time, plan version) of each instance's latest snapshot
    outcomes: Sequence[Sequence[Any]]  # (error or None, seconds) of each transition ended since the last tick


class DecisionRecord(NamedTuple):
    """The controller's decision at a tick."""

    time: float
    policy: str
    reason: str
    before_version: int
    target_version: int
    transitions: Sequence[str]
    outcome: str  # "started", or "rejected: ..."


Record = (
    Engine
    | CostsRecord
    | InstanceRecord
    | PlanRecord
    | Step
    | Arrival
    | MovedRecord
    | AnswerRecord
    | Tick
    | DecisionRecord
    | RegroupRecord
)
KINDS: Mapping[str, type[Any]] = {
    "engine": Engine,
    "costs": CostsRecord,
    "instance": InstanceRecord,
    "inforce": PlanRecord,
    "step": Step,
    "arrival": Arrival,
    "moved": MovedRecord,
    "answer": AnswerRecord,
    "tick": Tick,
    "decided": DecisionRecord,
    "regroup": RegroupRecord,
}
# Earlier names of the fields of `Resources`, which logs may have.
OLD_RESOURCES = {"least_pages": "min_pages", "most_pages": "max_pages", "kept": "in_place"}
# Fields of resources that earlier versions had for the sizes of stages.
OLD_SIZES = ("fixed", "page_bytes", "layer_bytes", "in_place")
_KIND_OF = {record: kind for kind, record in KINDS.items()}


# -- writing


class StepLog:
    """A log that takes records from any thread and writes them to a file in a thread of its own."""

    def __init__(self, path: str | Path, facts: Mapping[str, Any]):
        """Overwrite the file. Raise `ConfigError` if it cannot be written."""
        self._waiting: deque[Record] = deque([Engine(FORMAT, facts)])
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  the thread closes it
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror} (step_log)") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-step-log", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a record and return at once."""
        self._waiting.append(record)

    def close(self) -> None:
        """Write the queued records and end the thread. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._file:
                while not self._closing.wait(INTERVAL):
                    self._flush()
                self._flush()
        except OSError as error:
            log.error("the step log ends here: cannot write %s: %s (step_log)", self._file.name, error.strerror)
            self._waiting = deque(maxlen=0)

    def _flush(self) -> None:
        waiting = self._waiting
        for _ in range(len(waiting)):
            record = waiting.popleft()
            self._file.write(json.dumps((_KIND_OF[type(record)], *record)) + "\n")
        self._file.flush()


class InstanceLog:
    """The part of the log that one step loop writes, in the thread that steps."""

    def __init__(self, log: StepLog, core: EngineCore, buckets: Buckets):
        self._log, self._core, self._loads = log, core, Loads(buckets)
        self._next = 0  # number of the next step to be scheduled
        self._version = -1
        self._open: deque[tuple[Any, ...]] = deque()  # (begun, dispatched, load, version, tiles) of dispatched steps
        self._known: set[str] = set()  # ids of the requests in flight that have arrived here, or been moved here
        log.write(InstanceRecord(core.index, core.name))

    def accepted(self, request: Request) -> None:
        """Log an accepted request."""
        params, answers = request.params, 0 if request.embed else request.params.n
        self._known.add(request.id)
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
        """Log a change of the plan and requests that have been moved here, and remember a step.

        It was scheduled at `begun` and dispatched at `now`. Call it before the next step is scheduled.
        """
        plan_fields, load = self._core.plan_fields, self._loads.of(work)
        if plan_fields.plan_version != self._version:
            self._version = plan_fields.plan_version
            layers = dict(plan_fields.layers_by_precision)
            self._log.write(PlanRecord(self._core.index, self._version, layers, plan_fields.kv_pages_total))
        for sequence in (*work.decodes, *(chunk.sequence for chunk in work.chunks)):
            if sequence.request.id not in self._known:
                self._known.add(sequence.request.id)
                self._log.write(MovedRecord(sequence.request.id, self._core.index, work.step))
        self._open.append((begun, now, load, self._version, self._loads.tiles(work)))
        self._next = work.step + 1

    def ended(self, work: Work, now: float, outputs: Sequence[RequestOutput]) -> None:
        """Log the end of the oldest dispatched step, and the requests that it finished."""
        begun, dispatched, load, version, tiles = self._open.popleft()
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
                tiles,
            )
        )
        for output in outputs:
            if output.finished:
                self._known.discard(output.request_id)
                self._log.write(self._answer(work, output))

    def _answer(self, work: Work, output: RequestOutput) -> AnswerRecord:
        sequences = (*work.decodes, *(chunk.sequence for chunk in work.chunks))
        last = next(sequence for sequence in sequences if sequence.request.id == output.request_id)
        return AnswerRecord(
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
    """The contents of a step log, in the order of writing."""

    facts: Mapping[str, Any]
    costs: MeasuredCosts | None = None  # the step times that the policy was told; earlier versions told it none
    steps: tuple[Step, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    answers: Mapping[str, AnswerRecord] = field(default_factory=dict)  # by request id
    ticks: tuple[Tick, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    instances: tuple[InstanceRecord, ...] = ()  # in the order in which they began
    regroups: tuple[RegroupRecord, ...] = ()
    moved: tuple[MovedRecord, ...] = ()


def read_log(path: str | Path) -> Recording:
    """Read a step log, ignoring a last line that is cut off. Raise `ConfigError` naming the line that is at fault."""
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
        raise ConfigError(f"{path} is not a step log of format {FORMAT}")
    return Recording(
        _with_present_names(records[Engine][0].facts),
        _costs(records[CostsRecord], path),
        tuple(records[Step]),
        tuple(records[PlanRecord]),
        tuple(records[Arrival]),
        {answer.id: answer for answer in records[AnswerRecord]},
        tuple(records[Tick]),
        tuple(decided._replace(transitions=tuple(decided.transitions)) for decided in records[DecisionRecord]),
        tuple(records[InstanceRecord]),
        tuple(records[RegroupRecord]),
        tuple(records[MovedRecord]),
    )


def _costs(records: Sequence[CostsRecord], path: str | Path) -> MeasuredCosts | None:
    try:
        return MeasuredCosts.from_dict(records[-1].table) if records else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: its costs of steps are damaged: {error!r}") from error


def _with_present_names(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of a log, which an earlier version may have written, with the present names of resources."""
    if "resources" not in facts:
        return facts
    resources = {OLD_RESOURCES.get(name, name): value for name, value in facts["resources"].items()}
    return {**facts, "resources": resources}


def resource_facts(resources: Resources, plan: Plan) -> dict[str, Any]:
    """Return resources as facts of a log, with the sizes of the stages that the first instance of `plan` has."""
    table = SizeTable.of(resources.sizes, plan.instances[0])
    # Costs have a record of their own, shapes are a fact of the engine, and the sizes are those of one degree.
    others = ("sizes", "costs", "shapes", "degrees")
    numbers = {field.name: getattr(resources, field.name) for field in fields(resources) if field.name not in others}
    return {**numbers, "sizes": {**vars(table), "layers": [(*key, size) for key, size in table.layers.items()]}}


def resources_of(facts: Mapping[str, Any], plan: Plan) -> Resources:
    """Return resources from the facts of a log, which an earlier version may have written.

    `plan` is the first plan of the log.
    """
    numbers = {name: facts[name] for name in facts if name not in ("sizes", *OLD_SIZES)}
    sizes = facts["sizes"] if "sizes" in facts else _sizes_by_block(facts, plan.instances[0])
    table = SizeTable(
        {(block, precision): size for block, precision, size in sizes["layers"]},
        sizes["fixed"],
        sizes["pages"],
        tuple(sizes["in_place"]),
    )
    return Resources(**{**numbers, "sizes": table, "segments": tuple(facts.get("segments", ()))})


def _sizes_by_block(facts: Mapping[str, Any], instance: InstancePlan) -> dict[str, Any]:
    """Return the sizes of an earlier version's log, which had them by the number of the stage."""
    fixed: dict[str, int] = {}
    pages: dict[str, int] = {}
    for stage, stage_fixed, page in zip(instance.stages, facts["fixed"], facts["page_bytes"], strict=True):
        fixed[stage.blocks[0].block] = stage_fixed
        layers = [block.block for block in stage.blocks if is_layer(block.block)]
        pages |= dict.fromkeys(layers, page // len(layers))
    return {"layers": facts["layer_bytes"], "fixed": fixed, "pages": pages, "in_place": facts.get("in_place", ())}


def _parsed(line: str, where: str) -> Any:
    try:
        kind, *fields = json.loads(line)
        return KINDS[kind](*fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {line[:80].strip()!r} is not a record of a step log") from error
