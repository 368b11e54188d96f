"""A recorded run is replayed step by step and decision by decision, and differences are reported."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from jaxserve.control import InstancePlan, PlanInForce
from jaxserve.control.controller import Controller
from jaxserve.control.costs import Curve, LayerCosts, MeasuredCosts
from jaxserve.control.plan_yaml import to_dict
from jaxserve.control.policies import load_policy
from jaxserve.control.reconfigure import PlanFacts
from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import assignment_id
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.logged_controller import LoggedController
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.step_log import (
    CostsRecord,
    InstanceLog,
    Recording,
    StepLog,
    read_log,
    resource_facts,
    resources_of,
)
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.sim.actuator import SimActuator
from jaxserve.sim.driver import Agenda
from jaxserve.sim.hardware import Link
from jaxserve.sim.links import SharedLinks
from jaxserve.sim.recorded import Diverged, RecordedCostModel, replay
from jaxserve.telemetry import EngineMetrics, Snapshot
from tests.sim.devices import PendingStep, VirtualDevice
from tests.support.control import MB, entries_of, fields_of, home_plan, ledgers_of, machine
from tests.support.thorough import some

PAGE, TILE, LONGEST, PAGES, SEQS = 4, 8, 128, 50, 8
BUCKETS = Buckets(SEQS, 4, TILE, 1, (LONGEST // PAGE,))
SECONDS = {"bfloat16": 0.004, "int8": 0.003, "int4": 0.002}
RESOURCES = replace(
    machine(8, home_pages=PAGES, max_pages=400), min_pages=LONGEST // PAGE + 1, shapes=BUCKETS, page_size=PAGE
)


class RecordedEngine(VirtualClock):
    """An engine and its controller on one clock: time passes in the device, and at every call of `now`.

    The controller ticks whenever it is due, also between the end of a step and the loop's work after it.
    """

    def __init__(
        self,
        path: Path,
        requests: Sequence[tuple[float, int, int]],
        *,
        policy: str,
        seed: int = 0,
        costs: MeasuredCosts | None = None,
    ):
        super().__init__(1000.0)
        self.rng = np.random.default_rng(seed)
        self.requests = deque(enumerate(requests))
        plan = home_plan(8, pages=PAGES)
        self.in_force = PlanInForce(plan)
        facts = {
            "model": "small",
            "plan": to_dict(plan),
            "buckets": asdict(BUCKETS),
            "page_size": PAGE,
            "reserved_kv_pages": RESOURCES.max_pages,
            "prefix_caching": True,
            "overlap": True,
            "max_model_len": LONGEST,
            "policy": policy,
            "slo_ttft": 4.0,
            "swap_order": tuple(range(8)),
            "resources": resource_facts(RESOURCES, plan),
        }
        self.log = StepLog(path, facts)
        if costs is not None:
            self.log.write(CostsRecord(costs.to_dict()))
        pages = PagePool(PAGES, caching=True, min_pages=LONGEST // PAGE + 1, max_pages=RESOURCES.max_pages)
        self.core = EngineCore(
            Scheduler(SchedulerLimits(SEQS, 4, TILE, PAGE), pages, PageTable(SEQS, LONGEST // PAGE)),
            ModelInfo("small", LONGEST, 2**31 - 1, 8, 0),
            None,
            EngineMetrics("small"),
            salt=assignment_id(plan.instances[0].layer_precisions),
            plan_fields=fields_of(plan.instances[0], plan.version),
            loads=Loads(BUCKETS),
            cost=None if costs is None else costs.of(plan.instances[0]),
        )
        self.loop = StepLoop(self.core, self.device(), self, log=InstanceLog(self.log, self.core, BUCKETS))
        self.loop.wake = lambda: None
        resources = replace(RESOURCES, costs=costs)
        known = load_policy(policy, resources, range(8), slo_ttft=4.0)
        self.agenda = Agenda(Watch(self))
        actuator = SimActuator(
            "0",
            LoopInstance(self.loop),
            plan.instances[0],
            self.in_force,
            Watch(self),
            self.agenda,
            SharedLinks({"pcie": Link(1000 * MB, 0.0)}),
            "pcie",
            ledgers=ledgers_of(plan, resources),
            entries=lambda plan: entries_of(plan, resources),
            facts=PlanFacts(fields_of, costs),
        )
        self.controller = LoggedController(self.log, self.in_force, known, resources, {"0": actuator})
        self.next_tick = self.time
        self.busy = False  # with an event, during which no other one is handled

    def device(self) -> VirtualDevice:
        """Return a device whose steps take a random time."""

        def seconds_of(work: Work) -> float:
            return float(self.rng.uniform(0.01, 0.05))

        return SlowDispatch(self, seconds_of, lambda end: self.pass_time(max(0.0, end - self.time)), token=1)

    def now(self) -> float:
        now = self.time
        self.pass_time(float(self.rng.uniform(1e-5, 3e-4)))
        return now

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, with the ticks and the actuator's events that are due meanwhile."""
        end = self.time + seconds
        while not self.busy and (due := min(self.next_tick, self.agenda.next_event())) <= end:
            self.time, self.busy = max(self.time, due), True
            if due == self.next_tick:
                self.controller.tick(self.time, {"0": self.core.snapshot})
                self.next_tick += float(self.rng.uniform(0.1, 0.12))
            else:
                self.agenda.advance()
            self.busy = False
        self.time = max(self.time, end)

    def run(self, linger: float = 5.0) -> None:
        """Run until all requests are answered, and `linger` seconds longer."""
        while self.requests or not self.loop.idle:
            self.take_requests()
            self.loop.step()
            if self.loop.idle:
                self.pass_time(0.01)
        for _ in range(int(100 * linger)):
            self.pass_time(0.01)
            self.loop.run_calls()
        self.log.close()

    def take_requests(self) -> None:
        while self.requests and 1000 + self.requests[0][1][0] <= self.time:
            number, (arrival, prompt, answer) = self.requests.popleft()
            params = SamplingParams(max_tokens=answer, ignore_eos=True)
            self.loop.add(Request(f"r{number}", (number + 5,) * prompt, params, 1000 + arrival))


class SlowDispatch(VirtualDevice):
    """A device whose dispatch takes a millisecond of the engine's time."""

    clock: RecordedEngine

    def execute(self, work: Work) -> PendingStep:
        self.clock.pass_time(1e-3)
        return super().execute(work)


class Watch:
    """A clock that tells an engine's time, which does not pass meanwhile."""

    def __init__(self, engine: RecordedEngine):
        self._engine = engine

    def now(self) -> float:
        return self._engine.time


class LoopInstance:
    """A step loop as an instance whose plan changes (`sim.actuator.ActuatedInstance`)."""

    def __init__(self, loop: StepLoop):
        self.core, self.loop = loop.core, loop

    def call(self, function: Callable[[], None]) -> None:
        self.loop.call(function)

    def after_dispatched(self, function: Callable[[], None]) -> None:
        self.loop.after_dispatched(function)

    def set_plan(self, plan: InstancePlan) -> None:
        pass


def burst(seed: int, count: int = 70) -> list[tuple[float, int, int]]:
    """Return arrivals (s), prompts and answers (tokens): few, then more than the pages hold, then few again."""
    rng = np.random.default_rng(seed)
    gaps = np.where(np.arange(count) // 10 % 4 == 1, 0.02, 0.6) * rng.exponential(1, count)
    return [(float(t), int(rng.integers(1, 60)), int(rng.integers(1, 60))) for t in np.cumsum(gaps)]


def recorded(path: Path, policy: str = "morph", seed: int = 0) -> Recording:
    RecordedEngine(path, burst(seed), policy=policy, seed=seed).run()
    return read_log(path)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Recording:
    return recorded(tmp_path_factory.mktemp("log") / "steps.jsonl")


# 14: a decision names a wait since a preemption
RUNS = list(product([0, 1, 2, 3, 14], ["static", "morph-performance", "morph"]))


@pytest.mark.parametrize(("seed", "policy"), some(RUNS, 5))
def test_a_run_is_replayed_with_every_step_and_every_decision(tmp_path, policy, seed):
    found = recorded(tmp_path / "log", policy, seed)
    again = replay(found)
    assert again.steps == len(found.steps) > 500
    assert again.decisions == found.decisions
    assert bool(found.decisions) == (policy != "static")
    assert again.plan.version == max(step.version for step in found.steps) or policy != "static"


def test_a_replayed_policy_sees_the_costs_and_times_of_steps_that_the_recorded_one_saw(tmp_path, monkeypatch):
    seen: list[tuple[float, float]] = []
    tick = Controller.tick

    def spy(controller: Controller, now: float, snapshots: Mapping[str, Snapshot]) -> None:
        (snapshot,) = snapshots.values()
        seen.append((snapshot.busy_seconds, snapshot.expected_seconds))
        tick(controller, now, snapshots)

    monkeypatch.setattr(Controller, "tick", spy)
    precisions = {name: Curve(((1, 0.001), (8, seconds))) for name, seconds in SECONDS.items()}
    costs = MeasuredCosts(("dense",) * 8, {"dense": LayerCosts(precisions, 1e-5, 1e-6)}, Curve(((1, 0.004),)), 1e-4)
    RecordedEngine(tmp_path / "log", burst(0), policy="morph", costs=costs).run()
    recorded_times = seen.copy()
    seen.clear()
    found = read_log(tmp_path / "log")
    assert found.costs == costs
    assert replay(found).decisions == found.decisions
    assert len(seen) == len(recorded_times)
    for found_times, expected_times in zip(seen, recorded_times, strict=True):
        assert found_times == pytest.approx(expected_times)
    assert min(recorded_times[-1]) > 0


def test_damaged_costs_in_a_log_are_named(tmp_path):
    log = StepLog(tmp_path / "log", {})
    log.write(CostsRecord({"kinds": ["dense"], "layers": {}}))
    log.close()
    with pytest.raises(ConfigError, match="costs of steps are damaged"):
        read_log(tmp_path / "log")


def test_what_an_operator_changes_is_no_decision_of_a_tick(tmp_path, recording):
    """Even if the change is at the time of a tick."""
    engine = RecordedEngine(tmp_path / "log", burst(0), policy="morph")
    engine.controller.change_policy(engine.time, load_policy("morph", RESOURCES, range(8), slo_ttft=4.0), "the same")
    assert len(engine.controller.decisions) == 1
    engine.run()
    found = read_log(tmp_path / "log")
    assert found.decisions == recording.decisions == replay(found).decisions


def test_the_run_that_is_replayed_has_what_is_hard(recording):
    assert any(answer.preemptions for answer in recording.answers.values())
    assert len({step.version for step in recording.steps}) > 5
    assert any(decided.outcome == "started" for decided in recording.decisions)
    ended = {step.ended for step in recording.steps}
    late = [tick for tick in recording.ticks for time, _ in tick.seen if any(time < e < tick.time for e in ended)]
    assert late  # the controller saw a snapshot that a step's end had made old


def test_a_step_that_differs_is_told(recording):
    steps = list(recording.steps)
    steps[40] = steps[40]._replace(context=steps[40].context + 1)
    with pytest.raises(Diverged, match="step 40: "):
        replay(replace(recording, steps=tuple(steps)))


def test_a_decision_that_differs_is_told(recording):
    first, *others = recording.decisions
    changed = first._replace(reason="out of a whim")
    with pytest.raises(Diverged, match=r"recorded .*out of a whim"):
        replay(replace(recording, decisions=(changed, *others)))
    with pytest.raises(Diverged, match="was decided"):
        replay(replace(recording, decisions=tuple(others)))
    extra = recording.decisions[-1]._replace(time=recording.ticks[-1].time)
    with pytest.raises(Diverged, match="recorded but not decided"):
        replay(replace(recording, decisions=(*recording.decisions, extra)))


def test_another_policy_decides_otherwise(recording):
    other = load_policy("morph-performance", RESOURCES, range(8), slo_ttft=4.0)
    with pytest.raises(Diverged):
        replay(recording, other)


def test_a_plan_that_no_decision_led_to_is_told(recording):
    steps = [step._replace(version=step.version + 100) if step.number > 30 else step for step in recording.steps]
    with pytest.raises(Diverged, match="the decisions lead to plan"):
        replay(replace(recording, steps=tuple(steps)))


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_it_goes(recording):
    kept = recording.steps[:200]
    end = kept[-3].ended  # answers that ended with the last two steps are not in the log
    cut = replace(
        recording,
        steps=kept,
        answers={name: answer for name, answer in recording.answers.items() if answer.last_token <= end},
        ticks=tuple(tick for tick in recording.ticks if tick.time < end),
        decisions=tuple(decided for decided in recording.decisions if decided.time < end),
    )
    assert replay(cut).steps == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reason": "stop"}, "ended by 'stop'"),
        ({"cached_tokens": 8}, "8 tokens from the prefix cache"),
    ],
)
def test_answers_that_cannot_be_repeated_are_refused(recording, change, message):
    answers = dict(recording.answers)
    answers["r3"] = answers["r3"]._replace(**change)
    with pytest.raises(ConfigError, match=message):
        replay(replace(recording, answers=answers))


def test_several_answers_or_instances_and_steps_that_do_not_overlap_are_refused(recording):
    several = tuple(arrival._replace(answers=2) for arrival in recording.arrivals)
    with pytest.raises(ConfigError, match="2 answers"):
        replay(replace(recording, arrivals=several))
    with pytest.raises(ConfigError, match="overlap"):
        replay(replace(recording, facts={**recording.facts, "overlap": False}))
    two = {"plan": to_dict(home_plan(8, pages=PAGES, dp=2))}
    with pytest.raises(ConfigError, match="has 2"):
        replay(replace(recording, facts={**recording.facts, **two}))


def test_recorded_steps_end_when_they_did(recording):
    clock = VirtualClock()
    steps = [step for step in recording.steps if step.number < 3]
    timing = RecordedCostModel(steps, clock)
    clock.time = steps[0].begun
    assert clock.time + timing.seconds(steps[0].load) == pytest.approx(steps[0].ended)
    assert timing.seconds(steps[1].load) == pytest.approx(steps[1].ended - steps[0].ended)
    with pytest.raises(Diverged, match=r"step 2: .*tokens=1,.* recorded "):
        timing.seconds(StepLoad(1, 1, 1, 1, 1))
    timing.seconds(steps[2].load)
    with pytest.raises(Diverged, match="step 3 is not in the recording"):
        timing.seconds(steps[2].load)


def test_the_facts_of_a_recording_are_json(recording):
    assert json.loads(json.dumps(recording.facts)) == recording.facts


@pytest.mark.parametrize("names", [("least_pages", "most_pages", "kept"), ("min_pages", "max_pages", "in_place")])
def test_logs_of_earlier_versions_with_sizes_by_stage_are_replayed(tmp_path, names):
    RecordedEngine(tmp_path / "log", burst(0), policy="morph").run()
    table = RESOURCES.sizes
    lines = (tmp_path / "log").read_text().splitlines(keepends=True)
    kind, number, facts = json.loads(lines[0])
    facts["resources"] = {
        "budget": RESOURCES.budget,
        "fixed": [sum(table.fixed.values())],
        "layer_bytes": [(*key, size) for key, size in table.layers.items()],
        "page_bytes": [sum(table.pages.values())],
        "copy_rate": RESOURCES.copy_rate,
        "segments": [],
    } | dict(zip(names, (RESOURCES.min_pages, RESOURCES.max_pages, []), strict=True))
    (tmp_path / "earlier").write_text(json.dumps([kind, number, facts]) + "\n" + "".join(lines[1:]))
    found = read_log(tmp_path / "earlier")
    read = resources_of(found.facts["resources"], home_plan(8, pages=PAGES))
    assert replace(read, shapes=BUCKETS, page_size=PAGE) == RESOURCES, "the log has these apart"
    assert replay(found).decisions == read_log(tmp_path / "log").decisions != ()
