"""The step log records what the engine did: steps, requests, ticks of the controller, and changes of the plan."""

import json
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from jaxserve.control import Outcome, PlanInForce, Policy, Resources, SwapPrecision
from jaxserve.control.policies import ManualPolicy, StaticPolicy
from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.logged_controller import LoggedController
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.step_log import InstanceLog, Recording, StepLog, Tick, read_log
from jaxserve.telemetry import Snapshot
from tests.sim.clusters import LONGEST, PAGE, TILE, cluster
from tests.support.control import MB, VirtualActuator, home_plan, machine, snapshot
from tests.support.file_size import file_size_limit

BUCKETS = Buckets(4, 4, TILE, 1, (LONGEST // PAGE,))


class ClockedExecutor:
    """An executor that moves the clock: 1 s for a dispatch, 10 s for a step."""

    def __init__(self, clock: VirtualClock):
        self.clock = clock

    def execute(self, work: Work) -> "ClockedStep":
        self.clock.time += 1
        return ClockedStep(self.clock, len(work.decodes) + len(work.chunks))


@dataclass
class ClockedStep:
    clock: VirtualClock
    rows: int

    def fetch(self) -> StepOutput:
        self.clock.time += 10
        return StepOutput(np.zeros(self.rows, np.int32))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps.jsonl"


def served(path, *requests: Request, overlap: bool = True) -> Recording:
    """Serve these requests, all added before the first step, and return the log of the engine."""
    clock = VirtualClock(100.0)
    core = cluster().front.instances["0"].core
    log = StepLog(path, {"model": "small"})
    loop = StepLoop(core, ClockedExecutor(clock), clock, overlap=overlap, log=InstanceLog(log, core, BUCKETS))
    for request in requests:
        loop.add(request)
    while not loop.idle:
        loop.step()
    log.close()
    return read_log(path)


def request(name: str, prompt: int, answer: int) -> Request:
    return Request(name, (7,) * prompt, SamplingParams(max_tokens=answer, ignore_eos=True), arrival=99.0)


def test_step_log_has_the_load_and_times_of_every_step(path):
    steps = served(path, request("a", 10, 3), request("b", 3, 2)).steps
    assert [step.number for step in steps] == [0, 1, 2]
    assert steps[0].load == StepLoad(tokens=32, rows=4, sequences=0, context=0, prefill=10 * 11 + 3 * 4)
    assert (steps[0].chunks, steps[0].prompt_tokens) == (2, 13)
    assert steps[1].load == StepLoad(tokens=2, rows=2, sequences=2, context=11 + 4, prefill=0)
    assert steps[2].load == StepLoad(tokens=1, rows=1, sequences=1, context=12, prefill=0)
    # a step is begun, and dispatched 1 s later; its tokens come after the next one's dispatch
    assert [(s.begun, s.dispatched, s.ended) for s in steps] == [(100, 101, 112), (101, 102, 123), (112, 113, 133)]


def test_step_log_without_overlap_has_the_times_of_every_step(path):
    steps = served(path, request("a", 10, 3), overlap=False).steps
    assert [(s.begun, s.dispatched, s.ended) for s in steps] == [(100, 101, 111), (111, 112, 122), (122, 123, 133)]


def test_step_log_counts_a_chunks_pairs_with_its_prefix(path):
    steps = served(path, request("a", 50, 1)).steps
    assert [step.prompt_tokens for step in steps] == [32, 18]
    assert [step.prefill for step in steps] == [32 * 33, 18 * (32 + 18 + 1)]


def test_step_log_has_the_arrival_and_the_answer_of_every_request(path):
    found = served(path, request("a", 10, 3), request("b", 3, 1))
    assert [(a.id, a.step, a.time, a.prompt_tokens, a.max_tokens, a.answers) for a in found.arrivals] == [
        ("a", 0, 99.0, 10, 3, 1),
        ("b", 0, 99.0, 3, 1, 1),
    ]
    a, b = found.answers["a"], found.answers["b"]
    assert (a.tokens, a.first_token, a.last_token, a.reason) == (3, 112.0, 133.0, "length")
    assert (b.tokens, b.first_token, b.last_token, b.preemptions, b.cached_tokens) == (1, 112.0, 112.0, 0, 0)


def test_step_log_has_the_steps_of_a_request_that_moves(path):
    clock, log = VirtualClock(100.0), StepLog(path, {})
    cores = [instance.core for instance in cluster(2).front.instances.values()]
    loops = [StepLoop(core, ClockedExecutor(clock), clock, log=InstanceLog(log, core, BUCKETS)) for core in cores]
    loops[0].add(request("a", 10, 4))
    loops[0].step()
    loops[0].drain()
    cores[1].attach(cores[0].detach(keep_pages=False), None, clock.now())
    while not loops[1].idle:
        loops[1].step()
    log.close()
    found = read_log(path)
    assert [(step.instance, step.number) for step in found.steps] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert [(arrival.id, arrival.instance) for arrival in found.arrivals] == [("a", 0)]
    assert [tuple(begun) for begun in found.instances] == [(0, "0"), (1, "1")]
    assert [tuple(moved) for moved in found.moved] == [("a", 1, 0)]
    answer = found.answers["a"]
    assert (answer.instance, answer.tokens, answer.preemptions, answer.first_token) == (1, 4, 0, 111.0)


def test_step_log_omits_refused_requests(path):
    clock, core = VirtualClock(), cluster().front.instances["0"].core
    log = StepLog(path, {})
    loop = StepLoop(core, ClockedExecutor(clock), clock, log=InstanceLog(log, core, BUCKETS))
    with pytest.raises(RequestError):
        loop.add(request("long", LONGEST, 1))
    log.close()
    assert read_log(path).arrivals == ()


def test_step_log_has_the_step_of_an_arrival_and_the_plan_of_a_step(path):
    clock, core = VirtualClock(), cluster().front.instances["0"].core
    core.replan(core.salt, Snapshot(kv_pages_total=39, plan_version=1, layers_by_precision={"bfloat16": 2}))
    log = StepLog(path, {})
    loop = StepLoop(core, ClockedExecutor(clock), clock, log=InstanceLog(log, core, BUCKETS))
    loop.add(request("a", 10, 5))
    loop.step()
    loop.step()
    loop.add(request("b", 10, 2))
    core.replan("int4", Snapshot(kv_pages_total=50, plan_version=2, layers_by_precision={"int4": 2}))
    while not loop.idle:
        loop.step()
    log.close()
    found = read_log(path)
    assert [arrival.step for arrival in found.arrivals] == [0, 2]
    assert [step.version for step in found.steps] == [1, 1, 2, 2, 2]
    assert [(p.version, p.layers, p.kv_pages) for p in found.plans] == [(1, {"bfloat16": 2}, 39), (2, {"int4": 2}, 50)]


def test_step_loop_without_a_log_runs():
    clock, core = VirtualClock(), cluster().front.instances["0"].core
    loop = StepLoop(core, ClockedExecutor(clock), clock)
    loop.add(request("a", 10, 2))
    assert [len(loop.step()) for _ in range(4)] == [0, 1, 1, 0]


# -- the controller


def controller_of(
    log: StepLog, policy: Policy, actuator: VirtualActuator, resources: Resources | None = None
) -> LoggedController:
    """Return the controller of one instance."""
    return LoggedController(log, actuator.in_force, policy, resources or machine(), {"0": actuator}, tick=0.1)


def test_step_log_has_the_controllers_ticks_decisions_and_outcomes(path):
    resources, home = replace(machine(), copy_rate=10 * MB), home_plan()  # half a second
    target = home.with_precisions("0", {"layers.3": "int4"})
    log, actuator = StepLog(path, {}), VirtualActuator(PlanInForce(home))
    controller = controller_of(log, ManualPolicy(target), actuator, resources)
    for now in (10.0, 10.05, 10.1, 12.0):
        actuator.now = now
        controller.tick(now, {"0": snapshot(now - 0.01, plan_version=controller.plan.version)})
    log.close()
    found = read_log(path)
    assert [tick.time for tick in found.ticks] == [10.0, 10.1, 12.0]  # the one between was not due
    assert [tick.busy for tick in found.ticks] == [False, True, False]
    assert [len(tick.outcomes) for tick in found.ticks] == [0, 0, 1]
    error, seconds = found.ticks[2].outcomes[0]
    assert error is None
    assert seconds == actuator.started[0][0].seconds
    assert found.ticks[0].seen == [[9.99, 1]]
    (decided,) = found.decisions
    assert (decided.time, decided.policy, decided.outcome) == (10.0, "manual", "started")
    assert list(decided.transitions) == [str(t) for t in actuator.started[0]]
    assert (decided.before_version, decided.target_version) == (1, 2)


def test_step_log_has_the_error_of_a_failed_transition(path):
    home = home_plan()
    target = home.with_precisions("0", {"layers.3": "int4"})
    log, actuator = StepLog(path, {}), VirtualActuator(PlanInForce(home), lambda transition: "no room")
    controller = controller_of(log, ManualPolicy(target), actuator)
    for now in (1.0, 9.0):
        actuator.now = now
        controller.tick(now, {"0": snapshot(now)})
    log.close()
    assert [error for tick in read_log(path).ticks for error, _ in tick.outcomes] == ["Broken: no room"]


def test_step_log_of_a_static_policy_has_no_decisions(path):
    log = StepLog(path, {})
    controller = controller_of(log, StaticPolicy(), VirtualActuator(PlanInForce(home_plan())))
    for now in range(5):
        controller.tick(float(now), {"0": snapshot(float(now))})
    log.close()
    found = read_log(path)
    assert (len(found.ticks), found.decisions) == (5, ())


# -- the file


def test_step_log_written_by_several_threads_keeps_lines_whole(path):
    log = StepLog(path, {"model": "small"})
    outcome = Outcome(SwapPrecision("0", "layers.0", "a", "b", (0,), 1, 2, 0.5), None, 0.5)

    def write(start: int) -> None:
        for number in range(start, start + 500):
            log.write(Tick(float(number), False, [], [(outcome.error, outcome.seconds)]))

    threads = [threading.Thread(target=write, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    log.close()
    assert read_log(path).facts == {"model": "small"}
    times = sorted(tick.time for tick in read_log(path).ticks)
    assert times == [float(1000 * n + i) for n in range(4) for i in range(500)]


def test_step_log_reader_ignores_a_truncated_last_line(path):
    whole = served(path, request("a", 10, 3))
    text = path.read_text()
    path.write_text(text[:-5])
    assert read_log(path).steps == whole.steps
    assert read_log(path).answers == {}  # the last line


@pytest.mark.parametrize("line", ["no json\n", '["step", 1]\n', '["what", 1]\n', "7\n"])
def test_error_for_an_invalid_record_names_the_line(path, line):
    path.write_text(json.dumps(["engine", 1, {}]) + "\n" + line)
    with pytest.raises(ConfigError, match=r"steps\.jsonl, line 2"):
        read_log(path)


def test_file_that_is_not_a_step_log_is_refused(path):
    with pytest.raises(ConfigError, match="cannot read the step log"):
        read_log(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="is not a step log of format 1"):
        read_log(path)
    path.write_text('["engine", 9, {}]\n')
    with pytest.raises(ConfigError, match="is not a step log of format 1"):
        read_log(path)


def test_unwritable_step_log_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*: .*directory.* \(step_log\)"):
        StepLog(tmp_path, {})


def test_step_log_that_cannot_be_written_any_more_ends_in_one_line(path, caplog):
    with file_size_limit(1000):
        log = StepLog(path, {"model": "small" * 1000})
        log.close()
    log.write(Tick(0.0, False, [], []))
    (record,) = caplog.records
    assert record.getMessage() == f"the step log ends here: cannot write {path}: File too large (step_log)"
    assert record.exc_info is None
