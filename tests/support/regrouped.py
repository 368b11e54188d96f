"""An engine whose instances the test merges, splits, adds and removes between two steps of its choice."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxserve.build import BuiltEngine, build
from jaxserve.control.diff import diff
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.plan_edits import PlanEdit, PlanEditor
from jaxserve.control.regroup import merged_plan, new_names, split_plans, structural_change
from jaxserve.control.resources import validate
from jaxserve.control.transitions import BetweenStepsOf, EachBetweenSteps, Outcome, Rendezvous, Sleep
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import Prompt, TokensPrompt
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import merge
from jaxserve.engine.sync_engine import SyncEngine
from tests.support.internals import (
    assert_no_record_left,
    do_not_pace_copies,
    references_in,
    regrouping_of,
    store_of,
)
from tests.support.procedures import drive

# Four instances of one device each.
OPTIONS = {
    "load_format": "dummy",
    "dp": 4,
    "max_tp": 4,
    "memory_gb": 8,
    "max_num_seqs": 3,
    "kv_pages": 40,
    "warmup": False,
    "fuse": False,
    "policy": "manual",
}
PATIENCE = 60.0  # s for an actuator's thread to do what it will
MAX_STEPS = 20_000

Change = Callable[["Regrouped"], object]


class Regrouped:
    """An engine that the test steps in its own thread, in which its instances change too."""

    def __init__(self, model: Any, *, gradual: bool = False, **options: Any):
        """With `gradual`, merges and splits go layer by layer."""
        self.built: BuiltEngine = build(EngineConfig(model=model, **(OPTIONS | options)))
        built = self.built
        assert built.control is not None
        self.regrouping = regrouping_of(built)
        self.go_gradually(gradual)
        built.control.close()  # the test decides
        do_not_pace_copies(built)  # whose thread makes them
        self.engine = SyncEngine(
            built.loops,
            built.info,
            built.tokenizer,
            built.clock,
            grammars=built.grammars,
            route=built.limits.route,
            max_model_len=built.limits.max_model_len,
            on_close=built.close,
        )
        built.connect(self.engine)
        self.resources = built.resolved.resources(copy_rate=1e9)
        self.start = built.in_force.plan
        self.answers: dict[str, RequestOutput] = {}
        self.outcomes: list[Outcome] = []
        self._given: tuple[str, ...] = ()  # names that were given last

    def close(self) -> None:
        self.engine.close()

    def go_gradually(self, gradual: bool) -> None:
        """Merge and split layer by layer from now on, or at once."""
        self.regrouping = replace(self.regrouping, longest_stop=-1.0 if gradual else math.inf)

    # -- requests

    def add(self, prompt: Prompt | Sequence[int], params: SamplingParams) -> str:
        if not hasattr(prompt, "text"):
            prompt = TokensPrompt(tuple(prompt))
        return self.engine.add(prompt, params)

    def step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id] = merge(self.answers.get(output.request_id), output)

    def run(self, changes: Iterable[Change] = (), every: int = 5) -> None:
        """Step to the end of all requests, and make the next change after every so many steps."""
        remaining = list(changes)
        for number in itertools.count(1):
            if self.engine.idle and not remaining:
                return
            assert number < MAX_STEPS, "requests make no progress"
            self.step()
            if remaining and number % every == 0:
                remaining.pop(0)(self)

    # -- instances

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.built.in_force.plan

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(instance.name for instance in self.plan.instances)

    def merge(self, *names: str) -> str:
        """Merge instances, and return the name of the new one."""
        members = [self.plan.instance(name) for name in names]
        (name,) = self.new_names(1)
        whole = merged_plan(members, name)
        whole = whole.with_precisions(members[0].precisions)
        least = self.resources.limits_of(whole.tp).min_pages
        self.change(self._with(names, [whole.with_kv_pages(max(whole.kv_pages, least))]))
        return name

    def split(self, name: str, count: int = 2) -> tuple[str, ...]:
        """Split an instance, and return the names of the new ones."""
        names = self.new_names(count)
        whole = self.plan.instance(name)
        whole = whole.with_kv_pages(whole.kv_pages // count * count)
        parts = split_plans(whole, names)
        pages = min(parts[0].kv_pages, *map(self.resources.kv_capacity, parts))
        self.change(self._with([name], [part.with_kv_pages(pages) for part in parts]))
        return names

    def remove(self, name: str) -> None:
        self.change(self._with([name], []))

    def add_instance(self, like: InstancePlan, *devices: int) -> str:
        """Add an instance of one stage on these devices, and return its name."""
        (name,) = self.new_names(1)
        (stage,) = like.stages
        self.change(self._with([], [InstancePlan((replace(stage, devices=devices),), name, like.max_num_seqs)]))
        return name

    def edit(self, action: str, *names: str) -> None:
        """Change instances as operators do by hand."""
        editor = PlanEditor(self.start, self.resources, self.built.in_force.used_names)
        self.change(editor.edited(self.plan, PlanEdit(action, names)))

    def new_names(self, count: int) -> tuple[str, ...]:
        self._given = new_names(self.plan, count, self._given)
        return self._given

    def _with(self, before: Sequence[str], after: Sequence[InstancePlan]) -> Plan:
        kept = [instance for instance in self.plan.instances if instance.name not in before]
        return Plan(self.plan.version + 1, (*kept, *after))

    def change(self, wanted: Plan) -> None:
        """Put a plan in force now. Raise what made the change fail."""
        change = structural_change(self.plan, wanted, self.resources)
        validate(wanted, self.resources, self.plan.instances)
        before = self.plan
        self.adapt(change.align)
        try:
            self.regroup(change.regroups)
        except Exception:
            self.adapt({name: before.instance(name) for name in change.align if name in self.names})
            raise
        self.adapt(change.finish)

    def regroup(self, regroups: Sequence[Any]) -> None:
        errors: list[Exception] = []

        def report(outcome: Outcome, error: Exception | None) -> None:
            self.outcomes.append(outcome)
            errors.extend([error] if error else [])

        drive(self.regrouping.carry_out(tuple(regroups), report), self._wait)
        if errors:
            raise errors[0]

    def _wait(self, wait: Any) -> Any:
        """Wait for what the procedure yields, while steps go on."""
        match wait:
            case Rendezvous():
                with self.engine.stopped(wait.instances):
                    wait.function()
                return None
            case EachBetweenSteps():
                self.step()
                for name, function in wait.functions.items():
                    between_steps(self.engine.loops[name], function)
                return None
            case Sleep():
                self.step()
                return None
            case BetweenStepsOf():
                self.step()
                return between_steps(self.engine.loops[wait.instance], wait.function)
        while not wait.fence:
            self.step()
        return None

    def adapt(self, plans: Mapping[str, InstancePlan]) -> None:
        """Put plans of instances in force that stay on their devices, while requests go on."""
        actuators = self.built.actuators
        for name, plan in plans.items():
            if transitions := diff(self.plan.instance(name), plan, self.resources):
                actuators[name].start(transitions)
        end = time.monotonic() + PATIENCE
        while any(actuators[name].busy for name in plans):
            assert time.monotonic() < end, "an actuator makes no progress"
            self.step()
        for name, plan in plans.items():
            errors = [outcome.error for outcome in actuators[name].poll() if outcome.error]
            assert not errors, errors
            assert self.plan.instance(name) == plan

    # -- what must hold

    def check_ledgers(self) -> None:
        """Check that the ledgers have what the plan in force says, and nothing else."""
        resolved = self.built.resolved
        expected = resolved.limits.device_entries(*self.plan.instances)
        for device, ledger in resolved.ledgers.items():
            entries = {name: size for name, size in ledger.entries.items() if size and name != "runtime"}
            assert entries == expected.get(device, {}), device
            assert ledger.used <= ledger.budget

    def check_idle(self) -> None:
        """Check that nothing of any request is left, and that weights and pools are those of the plan in force."""
        assert self.engine.idle
        assert_no_record_left(self.engine)
        assert set(self.engine.loops) == set(self.names)
        blocks = 0
        for steps in self.engine.loops.values():
            core = steps.core
            assert not core.request_ids
            assert core.scheduler.pages.used == 0
            assert core.scheduler.table.free_slots == core.scheduler.limits.max_num_seqs
            blocks += len(steps.executor.blocks)
        store = store_of(next(iter(self.engine.loops.values())).executor)
        tied = self.built.resolved.padded_model.tie_embeddings
        assert sum(references_in(store).values()) == blocks + tied * len(self.engine.loops)
        self.check_ledgers()


def between_steps(steps: StepLoop, function: Callable[[], None]) -> list[bool]:
    """Call a function between two steps, which may be in flight. Return a fence, which is empty until they end."""
    function()
    fence: list[bool] = []
    steps.after_dispatched(lambda: fence.append(True))
    return fence
