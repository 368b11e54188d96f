"""Steps are timed at the start: what an executor on a virtual clock takes is found, and later starts read it."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.compilation.cache import use_persistent_cache
from jaxserve.control import BlockPlan, InstancePlan, StagePlan
from jaxserve.control.costs import MeasuredCosts
from jaxserve.core.config import ModelConfig
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import StepOutput, Work
from jaxserve.executor import time_bounds, timing
from jaxserve.executor.timing import FOLDER, CostTimer, step_costs
from jaxserve.kvcache import PageTable
from jaxserve.parallel.placement import Placement

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=8,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    max_position=256,
    tie_embeddings=False,
    dtype="bfloat16",
)
WINDOWED = replace(MODEL, windows=(None, 16, None, 16))
BUCKETS = Buckets(max_num_seqs=8, max_tiles=4, tile=8, min_rows=1, widths=(64,))
PAGE, PAGES = 4, 200
PER_TOKEN = {"bfloat16": 4e-5, "int8": 3e-5, "int4": 9e-5}  # s of a layer
PER_CONTEXT, PER_PREFILL = {None: 2e-7, 16: 1e-8}, {None: 3e-8, 16: 1e-9}  # s of a layer, by window
PLACEMENTS = [Placement((device,)) for device in jax.devices()[:2]]


@dataclass(eq=False)
class Layer:
    """A loaded layer."""

    block: str
    precision: str
    placement: Placement
    in_place: bool = False
    freed: bool = False
    nbytes: int = 1000

    def free(self) -> None:
        self.freed = True


@dataclass
class Clocked:
    """An executor whose steps take the seconds of a formula on a clock of their own.

    `fused` are the seconds that a fused step saves. A step may be `disturbed`.
    """

    model: ModelConfig = MODEL
    stages: int = 1
    copies: bool = False  # variants take memory
    fused: float = 0.0
    slowness: float = 1.0
    free_layers: bool = False
    disturbed: Callable[[int], float] = lambda step: 0.0
    time: float = 0.0
    steps: int = 0
    prepared: list[Layer] = field(default_factory=list)
    chains: list[tuple[Layer, ...]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    released: int = 0

    def __post_init__(self) -> None:
        self.buckets, self.page_size, self.table = BUCKETS, PAGE, PageTable(BUCKETS.max_num_seqs, 64)
        self.sampler = SimpleNamespace(max_len=256)
        count = self.model.num_layers
        places = [PLACEMENTS[index * self.stages // count] for index in range(count)]
        self.layers = [Layer(f"layers.{index}", "bfloat16", place) for index, place in enumerate(places)]
        ends = [Layer("embed", "bfloat16", places[0]), Layer("head", "bfloat16", places[-1])]
        self.blocks = [ends[0], *self.layers, ends[1]]
        self._chain: tuple[Layer, ...] | None = None
        self._loads = Loads(BUCKETS)
        self._device_free = 0.0

    def prepare(self, block: str, precision: str) -> Layer:
        alive = [layer for layer in self.prepared if not layer.in_place and not layer.freed]
        placement = next(layer.placement for layer in self.layers if layer.block == block)
        assert placement not in [layer.placement for layer in alive], "two variants in memory"
        self.prepared.append(Layer(block, precision, placement, in_place=not self.copies))
        return self.prepared[-1]

    @contextmanager
    def running(self, layers: Sequence[Layer], *, fused: bool = False) -> Iterator[None]:
        assert not fused or self.fused
        self._chain, self._fusing = tuple(layers), fused
        self.chains.append(self._chain)
        yield
        self._chain = None

    def execute(self, work: Work) -> SimpleNamespace:
        rows = self.table.rows
        pages = [rows[s.slot, : len(s.pages)].tolist() for s in (*work.decodes, *(c.sequence for c in work.chunks))]
        assert all(0 < page < PAGES for row in pages for page in row)
        self.steps += 1
        self.works.append(work)
        load = self._loads.of(work)
        assert self._chain is not None
        seconds = self.seconds(load, self._chain, self._fusing) * self.slowness + self.disturbed(self.steps)
        self._device_free = end = max(self._device_free, self.time) + seconds

        def fetch() -> StepOutput:
            self.time = max(self.time, end)
            return StepOutput(None)  # type: ignore[arg-type]

        return SimpleNamespace(fetch=fetch)

    def seconds(self, load: StepLoad, chain: Sequence[Layer], fused: bool = False) -> float:
        saved = self.fused if fused and not load.prefill else 0.0
        layers = [] if self.free_layers else chain
        rest = 1e-3 + 1e-4 * load.rows + 1e-5 * max(0, load.tokens - load.rows)
        return rest - saved + sum(self.layer_seconds(layer, load) for layer in layers)

    def layer_seconds(self, layer: Layer, load: StepLoad) -> float:
        window = self.model.window(int(layer.block.removeprefix("layers.")))
        attention = PER_CONTEXT[window] * load.context + PER_PREFILL[window] * load.prefill
        return 2e-4 + PER_TOKEN[layer.precision] * load.tokens + attention

    def shrink_pools(self, moves: dict, pages: int) -> None:
        assert (moves, pages) == ({}, 1)
        self.released += 1

    def wait_for_pools(self) -> None:
        pass

    def plan(self, *precisions: str) -> InstancePlan:
        """Return a plan with these precisions, in turns."""
        blocks = [BlockPlan(block.block, block.precision) for block in self.blocks]
        for index in range(self.model.num_layers):
            blocks[1 + index] = BlockPlan(f"layers.{index}", precisions[index % len(precisions)])
        return InstancePlan((StagePlan(tuple(blocks), (0,), PAGES),))


def measured(executor: Any, *variants: str) -> MeasuredCosts:
    plan = executor.plan("bfloat16")
    fused = (plan.layer_precisions, executor.plan("int4").layer_precisions) if executor.fused else ()
    return CostTimer(executor, executor.model, plan, variants, fused, lambda: executor.time).measure()


def check(costs: MeasuredCosts, executor: Clocked, *precisions: str, rel: float = 1e-6) -> None:
    """Check the costs of steps of many sizes against the executor's formula."""
    cost = costs.of(executor.plan(*precisions))
    chain = [replace(layer, precision=precisions[i % len(precisions)]) for i, layer in enumerate(executor.layers)]
    for load in (
        StepLoad(1, 1, 1, 50, 0),
        StepLoad(4, 4, 3, 900, 0),
        StepLoad(8, 8, 8, 8, 0),
        StepLoad(16, 2, 0, 0, 300),
        StepLoad(32, 4, 0, 0, 5000),
    ):
        assert cost.seconds(load) == pytest.approx(executor.seconds(load, chain), rel=rel), load


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["one kind", "two kinds"])
def test_measured_costs_add_up_to_what_steps_take(model: ModelConfig, stages: int, copies: bool) -> None:
    executor = Clocked(model, stages, copies)
    costs = measured(executor, "int8", "int4", "bfloat16")
    check(costs, executor, "bfloat16")
    check(costs, executor, "int4")
    check(costs, executor, "int8", "int4", "bfloat16")


def test_what_fusing_saves_is_no_cost_of_a_layer() -> None:
    executor = Clocked(fused=4e-4)
    costs = measured(executor, "int8", "int4")
    for precision, load, saved in (
        ("bfloat16", StepLoad(4, 4, 4, 4, 0), 4e-4),
        ("int4", StepLoad(4, 4, 4, 4, 0), 4e-4),
        ("int4", StepLoad(32, 4, 0, 0, 300), 0.0),  # a step with a prompt is not fused
        ("int8", StepLoad(4, 4, 4, 4, 0), 0.0),  # nor is one in precisions that nobody foresaw
    ):
        layers = [replace(layer, precision=precision) for layer in executor.layers]
        cost = costs.of(executor.plan(precision))
        assert cost.seconds(load) == pytest.approx(executor.seconds(load, layers) - saved), (precision, load)


@pytest.mark.parametrize("changes", [{"copies": True}, {"slowness": 50.0}], ids=["variants take memory", "slow steps"])
def test_fused_steps_are_not_timed_where_they_cost_more_than_they_tell(changes: dict) -> None:
    costs = measured(Clocked(fused=4e-4, **changes), "int4")
    assert tuple("int4" for _ in costs.kinds) not in costs.fused


def test_other_work_of_the_machine_biases_no_precision() -> None:
    executor = Clocked(disturbed=lambda step: 0.01 if step % 37 == 0 else 0.0)
    costs = measured(executor, "int8", "int4")
    check(costs, executor, "int8", rel=0.02)
    check(costs, executor, "int4", rel=0.02)
    check(costs, executor, "bfloat16", rel=0.02)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_costs_on_a_busy_machine_are_possible(share: float, seed: int) -> None:
    rng = Random(seed)
    busy = Clocked(disturbed=lambda step: rng.uniform(0, 0.02) if rng.random() < share else 0.0)
    costs = measured(busy, "int8", "int4")
    for tokens in (1, 4, 8, 16, 32):
        full, *few = (costs.layer_seconds(precision, tokens) for precision in ("bfloat16", "int8", "int4"))
        assert full > 0
        for seconds in few:
            assert 1 / (1.01 * time_bounds.MOST_TIMES) < seconds / full < 1.01 * time_bounds.MOST_TIMES


def test_disturbed_time_is_measured_again_until_it_is_found() -> None:
    rng = Random(0)
    executor = Clocked(disturbed=lambda step: rng.uniform(0.005, 0.02) if 20 < step < 80 else 0.0)
    timer = CostTimer(executor, MODEL, executor.plan("bfloat16"), ("int4",), (), lambda: executor.time)
    check(timer.measure(), executor, "int4", rel=0.05)


def test_timing_of_slow_steps_is_bounded() -> None:
    quick, slow = Clocked(), Clocked(slowness=50, copies=True)  # a step takes up to half a second
    costs = measured(quick, "int8", "int4"), measured(slow, "int8", "int4")
    assert quick.time < 1.5 * timing.BUDGET_S
    assert slow.time < 6
    assert max(len(chain) for chain in slow.chains) < 4, "not all layers"
    for found, executor in zip(costs, (quick, slow), strict=True):
        expected = executor.slowness * (2e-4 + 4 * PER_TOKEN["int4"]) * 4
        assert found.layer_seconds("int4", 4) == pytest.approx(expected, rel=1e-3)


def test_timing_leaves_nothing_behind() -> None:
    for copies in (True, False):
        executor = Clocked(copies=copies)
        measured(executor, "int8", "int4")
        assert not executor.table.rows.any()
        assert executor.released == 1
        assert executor.prepared
        assert all(layer.freed for layer in executor.prepared)
        assert not any(layer.freed for layer in executor.layers)


def test_attention_is_timed_on_long_contexts() -> None:
    executor = Clocked()
    measured(executor, "int4")
    longest = max(sequence.num_computed for work in executor.works for sequence in work.decodes)
    assert longest == PAGES // 4 * PAGE - PAGE, "as many pages as four sequences can have, without the null page"
    assert max(chunk.start for work in executor.works for chunk in work.chunks) == 255 - BUCKETS.tile


# -- the cache


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[MeasuredCosts, bool]]]:
    """Return a function that starts an engine, and returns its costs and whether steps were timed."""
    before = jax.config.jax_compilation_cache_dir
    use_persistent_cache(tmp_path)

    def run(executor: Any = None, variants: tuple[str, ...] = ("int4",), **facts: Any) -> tuple[MeasuredCosts, bool]:
        executor = executor or Clocked()
        plan = executor.plan("bfloat16")
        fused = [executor.plan(precision).layer_precisions for precision in facts.pop("fused", ())]
        costs = step_costs(executor, MODEL, plan, variants, fused, facts, lambda: executor.time)
        return costs, executor.steps > 0

    yield run
    jax.config.update("jax_compilation_cache_dir", before)


def test_later_start_reads_the_costs_of_the_first(start: Callable, tmp_path: Path) -> None:
    first, again = start(page_size=4), start(page_size=4)
    assert (first[1], again[1]) == (True, False)
    assert again[0] == first[0]
    assert len(list((tmp_path / FOLDER).glob("*.json"))) == 1


def test_start_with_other_variants_or_facts_times_its_steps(start: Callable) -> None:
    start(page_size=4)
    assert start(page_size=8)[1]
    assert start(page_size=4, variants=("int4", "int8"))[1]
    assert start(Clocked(fused=1e-4), page_size=4, fused=("bfloat16",))[1]
    assert not start(page_size=4)[1]


@pytest.mark.parametrize("damage", ["{", "[]", "{}", "null", "other model", "other precisions", "nan"])
def test_damaged_or_foreign_file_is_measured_anew(start: Callable, tmp_path: Path, damage: str) -> None:
    start()
    (file,) = (tmp_path / FOLDER).glob("*.json")
    value = json.loads(file.read_text())
    if damage == "other model":
        value["kinds"] *= 2
    elif damage == "other precisions":
        del value["layers"]["dense"]["by_precision"]["int4"]
    elif damage == "nan":
        value["rest"]["points"][0][1] = float("nan")
    file.write_text(json.dumps(value) if len(damage) > 4 or damage == "nan" else damage)
    assert start()[1]
    assert not start()[1], "the file is good again"


def test_costs_from_a_machine_that_was_too_busy_are_not_cached(start: Callable, caplog) -> None:
    assert start(Clocked(free_layers=True))[1]
    assert "the machine is busy" in caplog.text
    assert start()[1]


def test_without_a_persistent_cache_every_start_times_its_steps(start: Callable) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    assert start()[1]
    assert start()[1]
