"""A built engine whose plan changes while requests run, with a record of what was in force at every position."""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array

from jaxserve.build import BuiltEngine
from jaxserve.control.diff import diff
from jaxserve.control.ledger import Ledger
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.transitions import Outcome
from jaxserve.core.aligned_arrays import aligned
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.work import Work
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.host_memory import HostShards
from jaxserve.kernels.native import kv as native
from tests.support.canary import Canary
from tests.support.internals import between_steps, held_variants, run_pending_calls, store_of, wrap_block_reads

PATIENCE = 30.0  # seconds for a thread to do what it will
MAX_STEPS = 100_000  # of a run; the longest has some hundreds
OPTIONS = {
    "load_format": "dummy",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4 + 32,
    "memory_gb": 4,
    "kv_pages": 40,
    "max_kv_pages": 80,
    "max_model_len": 256,
    "policy": "manual",
    "variants": ("int8", "int4"),
}
PRECISIONS = ("float32", "int8", "int4")
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 499, length).tolist())


def with_layer_precisions(plan: Plan, precisions: Sequence[str]) -> Plan:
    return plan.with_precisions("0", {f"layers.{layer}": precision for layer, precision in enumerate(precisions)})


def in_all_instances(plan: Plan, change: Callable[[InstancePlan], InstancePlan]) -> Plan:
    """Return the plan with the same change of every instance."""
    for instance in plan.instances:
        plan = plan.with_instance(change(instance))
    return plan


def start_transitions(built: BuiltEngine, target: Plan) -> None:
    """Start the transitions from the plan in force to another one, in all instances that differ."""
    resources = built.resolved.resources(copy_rate=1e9)
    for instance in built.in_force.plan.instances:
        if transitions := diff(instance, target.instance(instance.name), resources):
            built.actuators[instance.name].start(transitions)


def target_of(change: str, plan: Plan) -> Plan:
    """Return the plan that one transition of this kind leads to."""
    return {
        "swap": plan.with_precisions("0", {"layers.1": "int4"}),
        "swap back": plan.with_precisions("0", {"layers.1": "float32"}),
        "grow": plan.with_kv_pages("0", 61),
        "shrink": plan.with_kv_pages("0", 30),
    }[change]


@contextmanager
def pools_of(kind: str) -> Iterator[None]:
    """Build pools that take memory page by page, where the machine has them, or in segments as on GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "segments":
            patch.setattr(native, "supports_elastic_pools", lambda: False)
        yield


@dataclass
class RequestRun:
    """A request from its admission to its end or its preemption.

    `known` is the number of tokens when it began, `in_force` has the precisions by block at each position.
    """

    known: int
    in_force: list[Mapping[str, str]]


def addresses(leaves: Sequence[Array]) -> set[int]:
    """Return where the buffers of arrays lie, on all devices."""
    return {shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards}


class Adapted:
    """An engine that the test's thread steps while the actuator's thread carries transitions out.

    Of several answers to a request, the first is recorded. Without `bytes_checked`, memory may exceed the ledger.
    """

    def __init__(self, built: BuiltEngine, *, bytes_checked: bool = True):
        assert built.control is not None
        built.control.close()  # the test decides
        self._bytes_checked = bytes_checked
        self.built, self.actuator, self.start = built, built.actuators["0"], built.in_force.plan
        self.resources = built.resolved.resources(copy_rate=1e9)
        self.engine = SyncEngine(built.loops, built.info, None, built.clock)
        self.steps = built.instances[0]
        self.store = store_of(self.steps.executor)
        self.runs: dict[str, list[RequestRun]] = {}  # by request
        self.outcomes: list[Outcome] = []
        self.canaries = [Canary(steps) for steps in built.instances]
        self._execute, self._prepare = self.steps.executor.execute, self.steps.executor.prepare
        self.steps.executor.execute, self.steps.executor.prepare = self.execute, self.prepare
        self._beside: list[Array] = []  # copies that have been made and may be in use, or still be there

    def close(self) -> None:
        """End the record and return to the first plan."""
        self.change(self.start)
        self.steps.executor.execute, self.steps.executor.prepare = self._execute, self._prepare
        for canary in self.canaries:
            canary.close()

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.built.in_force.plan

    @property
    def ledger(self) -> Ledger:
        """The ledger of the first instance's first device."""
        return self.built.resolved.ledgers[0]

    def execute(self, work: Work):
        executor = self.steps.executor
        precisions = {loaded.block: loaded.precision for loaded in executor.blocks}
        computed = [(s, s.num_computed - 1, 1) for s in work.decodes]
        computed += [(chunk.sequence, chunk.start, chunk.length) for chunk in work.chunks]
        for sequence, start, length in (entry for entry in computed if entry[0].index == 0):
            runs = self.runs.setdefault(sequence.request.id, [])
            if not runs or start != len(runs[-1].in_force):
                # It starts behind pages of the prefix cache, which would not have been found under other precisions.
                runs.append(RequestRun(len(sequence.tokens), [precisions] * start))
            runs[-1].in_force.extend([precisions] * length)
        self._beside = [leaf for leaf in self._beside if not leaf.is_deleted()]
        pages = self.check_bytes(self._beside)
        if not self.built.resolved.granule:
            assert executor.pools.nbytes <= pages
        assert self.steps.core.scheduler.pages.num_pages == self.plan.instances[0].kv_pages
        return self._execute(work)

    def prepare(
        self, block: str, precision: str, *, between: Callable[[], None], copied: Callable[[int], None]
    ) -> LoadedBlock:
        """Prepare a block, and check between the arrays of the copy that the ledger covers what is in memory.

        That includes what has been read, unless it becomes the block itself.
        """
        (devices,) = (loaded.placement.devices for loaded in self.steps.executor.blocks if loaded.block == block)
        made, same, thread = Counter[Any](), False, threading.get_ident()

        def noted(read: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*args: Any) -> Any:
                nonlocal same
                parameters = read(*args)
                if threading.get_ident() != thread:  # of another instance
                    return parameters
                leaves = jax.tree.leaves(dict(parameters))
                same = len(devices) == 1 and all(aligned(leaf) is leaf for leaf in leaves)
                made.update(dict.fromkeys(devices, sum(leaf.nbytes for leaf in leaves) // len(devices)))
                self.check_bytes(made=made)
                return parameters

            return reading

        def counted(size: int) -> None:
            if not same:
                made.update(dict.fromkeys(devices, size // len(devices)))
            self.check_bytes(made=made)
            copied(size)

        with pytest.MonkeyPatch.context() as patch:
            wrap_block_reads(patch, self.store, noted)
            loaded = self._prepare(block, precision, between=between, copied=counted)
        if not self.runs_in_place(loaded):
            self._beside += loaded.leaves
        return loaded

    def runs_in_place(self, loaded: LoadedBlock) -> bool:
        """Check that a layer runs in place if the store holds arrays for it, and that they are its own; return that."""
        held = held_variants(self.store).get((loaded.block, loaded.precision), {})
        shards = [shards for shards in jax.tree.leaves(dict(held)) if isinstance(shards, HostShards)]
        assert loaded.in_place == bool(shards)
        if not shards:
            return False
        assert addresses(loaded.leaves) == {part.ctypes.data for each in shards for part in each.parts}
        return True

    def held_bytes(self) -> Counter[jax.Device]:
        """Return the bytes of the held variants that layers run on, each shared by all devices that may use it."""
        bytes_held = Counter[jax.Device]()
        for (block, _), held in held_variants(self.store).items():
            shards = [shards for shards in jax.tree.leaves(dict(held)) if isinstance(shards, HostShards)]
            stages = [stage for instance in self.plan.instances for stage in instance.stages]
            stages = [stage for stage in stages if block in {each.block for each in stage.blocks}]
            devices = [self.built.resolved.devices[index] for stage in stages for index in stage.devices]
            share = math.ceil(sum(each.nbytes for each in shards) / len(devices))
            bytes_held.update(dict.fromkeys(devices, share))
        return bytes_held

    def check_bytes(self, beside: Sequence[Array] = (), made: Mapping[object, int] | None = None) -> int:
        """Check that the ledger covers everything on each device, and return the bytes of all pages.

        Everything: blocks, held variants, `beside` (arrays next to them), `made` (bytes by device of an unfinished
        copy), pages, and room for a step.
        """
        resolved = self.built.resolved
        while True:
            entries = {device: ledger.entries for device, ledger in resolved.ledgers.items()}
            held, pages = self._held(beside, made or {})
            # Otherwise a transition has ended meanwhile, in the actuator's thread.
            if entries == {device: ledger.entries for device, ledger in resolved.ledgers.items()}:
                break
        for device, sizes in entries.items():
            assert sum(sizes.values()) <= resolved.ledgers[device].budget
            if self._bytes_checked:
                assert held[resolved.devices[device]] <= sum(sizes.values()) - sizes.get("runtime", 0)
        return pages

    def _held(self, beside: Sequence[Array], made: Mapping[object, int]) -> tuple[Counter, int]:
        """Return the bytes by device, and those of all pages."""
        held, pages = self.held_bytes() + Counter(made), 0
        running = [loaded for steps in self.built.instances for loaded in steps.executor.blocks]
        used = (leaf for loaded in running if not loaded.in_place for leaf in loaded.leaves)
        there = (leaf for leaf in beside if not leaf.is_deleted())
        leaves = {id(leaf): leaf for leaf in (*used, *there)}
        for leaf in leaves.values():  # not by its shards: JAX lists them twice if two threads ask at once
            share = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            held.update(dict.fromkeys(leaf.sharding.device_set, share))
        for instance in self.plan.instances:
            for stage in instance.stages:
                entries = self.built.resolved.limits.stage_entries(stage)
                pages += entries["kv"] * stage.tp
                for device in stage.devices:
                    held[self.built.resolved.devices[device]] += entries["kv"] + entries["workspace"]
        return held, pages

    def ended(self, outcome: str) -> int:
        """Return how many transitions ended with this outcome, as the metrics show it."""
        lines = self.built.metrics.render().decode().splitlines()
        found = [line for line in lines if line.startswith("jaxserve_transitions_total") and f'"{outcome}"' in line]
        return sum(int(float(line.split()[-1])) for line in found)

    def begin(self, target: Plan) -> None:
        """Start the transitions to a plan."""
        start_transitions(self.built, target)

    def settled(self) -> bool:
        """Return whether no transition is under way."""
        actuators = self.built.actuators.values()
        busy = any(actuator.busy for actuator in actuators)
        self.outcomes += [outcome for actuator in actuators for outcome in actuator.poll()]
        return not busy

    def change(self, target: Plan) -> None:
        """Go to a plan while nothing runs, after waiting for running transitions."""
        self.wait()
        self.begin(target)
        self.wait()

    def wait(self) -> None:
        """Wait until no transition is under way, without stepping."""
        end = time.monotonic() + PATIENCE
        while not self.settled():
            assert time.monotonic() < end, "the actuator makes no progress"
            time.sleep(0.001)

    def add(self, prompt: tuple[int, ...], params: SamplingParams) -> str:
        return self.engine.add(TokensPrompt(prompt), params)

    def run(
        self,
        tokens: dict[str, tuple[int, ...]],
        targets: list[Plan] | None = None,
        leaving: Mapping[str, int] | None = None,
    ) -> None:
        """Step to the end of all requests, add to their tokens, and go from one target to the next meanwhile.

        `leaving` maps requests to the step before which they are aborted.
        """
        targets = targets or []
        for number in itertools.count():
            if self.engine.idle:
                break
            assert number < MAX_STEPS, "requests make no progress"
            if self.settled() and targets:
                self.begin(targets.pop(0))
            for request in (request for request, step in (leaving or {}).items() if step == number):
                self.engine.abort(request)
            self.step(tokens)
        with between_steps(self.engine):
            for canary in self.canaries:
                canary.check()
        run_pending_calls(self.engine)

    def step(self, tokens: dict[str, tuple[int, ...]]) -> None:
        """Run one step and add to the tokens of each request."""
        for output in self.engine.step():
            for answer in (answer for answer in output.outputs if answer.index == 0):
                tokens[output.request_id] = tokens.get(output.request_id, ()) + answer.token_ids

    def commit_behind_a_step(self, wanted: Plan, tokens: dict[str, tuple[int, ...]]) -> None:
        """Put a plan in force while the device has a step that is not fetched before the next one."""
        for _ in range(3):
            self.step(tokens)
        assert self.steps.in_flight
        self.begin(wanted)
        deadline = time.monotonic() + PATIENCE
        while self.plan.instances != wanted.instances:
            assert time.monotonic() < deadline, "the actuator makes no progress"
            time.sleep(0.001)
        with between_steps(self.engine):  # the commit has ended
            assert self.steps.in_flight
