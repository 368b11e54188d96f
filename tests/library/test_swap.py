"""Layers that change their precision between two steps while requests run."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.build import BuiltEngine, build
from jaxserve.calibration.pipeline import QuantizationSettings, quantize_layers
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.variants import Method, VariantWriter
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig
from jaxserve.core.degrees import Degrees
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import assignment_id
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.planning.resolve import resolve
from jaxserve.planning.workspace import ModelSizes, PinnedVariants
from tests.support.canary import Canary
from tests.support.internals import fused_tier_of, stages_of
from tests.support.reference import Reference

OPTIONS = {"load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 4 + 32, "memory_gb": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
VARIANTS = ("int8", "int4", "int3")
SPLIT = {"memory_gb": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32}  # every shape is compiled for each stage


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 499, length).tolist())


class Swapped:
    """A built engine whose layers change their precision."""

    def __init__(self, built: BuiltEngine):
        self.built = built
        (steps,) = built.instances
        self.core, self.executor, self.canary = steps.core, steps.executor, Canary(steps)
        self.engine = SyncEngine(built.loops, built.info, None, built.clock)
        self.precisions = list(built.resolved.plan.instances[0].layer_precisions)

    def swap(self, layer: int, precision: str) -> None:
        block = f"layers.{layer}"
        (old,) = self.executor.replace([self.executor.prepare(block, precision)])
        old.free()
        self.precisions[layer] = precision
        layers = {name: self.precisions.count(name) for name in self.precisions}
        held = sum(loaded.nbytes for loaded in self.executor.blocks)
        plan_fields = replace(self.core.plan_fields, layers_by_precision=layers, weight_bytes=held)
        self.core.replan(assignment_id(self.precisions), plan_fields)

    def run(self, *prompts: tuple[int, ...], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
        ids = [self.engine.add(TokensPrompt(p), params) for p in prompts]
        tokens: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
        while not self.engine.idle:
            for output in self.engine.step():
                tokens[output.request_id] += output.outputs[0].token_ids
        self.canary.check()
        return list(tokens.values())

    def logprob(self, p: tuple[int, ...]) -> float:
        """Return the log-probability of the likeliest token after a prompt."""
        self.engine.add(TokensPrompt(p), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1))
        pieces = []
        while not self.engine.idle:
            pieces += self.engine.step()
        ((entry,),) = [piece.outputs[0].logprobs for piece in pieces]
        return max(logprob.logprob for logprob in entry.values())


@pytest.fixture(scope="module")
def warm(tiny_model: Path) -> Iterator[BuiltEngine]:
    built = build(EngineConfig(model=tiny_model, variants=VARIANTS, **OPTIONS))
    yield built
    built.close()


@pytest.fixture
def swapped(warm: BuiltEngine) -> Iterator[Swapped]:
    swapped = Swapped(warm)
    yield swapped
    swapped.canary.close()
    for layer in range(3):
        swapped.swap(layer, "float32")


def test_swaps_while_requests_run_compile_nothing(swapped: Swapped) -> None:
    before = dict(swapped.built.compilations.counts)
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, logprobs=2)
    ids = [swapped.engine.add(TokensPrompt(prompt(i, 30 + 20 * i)), params) for i in range(6)]
    counts = dict.fromkeys(ids, 0)
    changes = [(layer, precision) for precision in (*VARIANTS, "float32") for layer in (0, 2, 1)]
    steps = 0
    while not swapped.engine.idle:
        for output in swapped.engine.step():
            counts[output.request_id] += len(output.outputs[0].token_ids)
        if steps % 3 == 0 and changes:
            swapped.swap(*changes.pop(0))
        steps += 1
    assert not changes
    assert set(counts.values()) == {40}, "every request goes on to its end"
    assert swapped.built.compilations.counts == before
    assert before["block"] > 0


def test_swaps_of_split_and_staged_layers_compile_nothing(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, tp=2, pp=2, variants=("int4",), **(OPTIONS | SPLIT)))
    swapped, before = Swapped(built), dict(built.compilations.counts)
    for precision in ("int4", "float32"):
        for layer in range(3):
            swapped.swap(layer, precision)
            (tokens,) = swapped.run(prompt(layer, 40))
            assert len(tokens) == 12
    assert built.compilations.counts == before
    built.close()


def test_answers_after_a_swap_equal_those_of_the_new_precisions(swapped: Swapped, tiny_model: Path) -> None:
    swapped.swap(0, "int4")
    swapped.swap(2, "int8")
    p = prompt(1, 40)
    assert swapped.run(p) == [Reference(tiny_model, {0: "int4", 2: "int8"}).greedy(p, 12)]


def test_answers_after_a_swap_back_equal_those_without_a_swap(swapped: Swapped) -> None:
    prompts = [prompt(2, 50), prompt(3, 70)]
    expected = swapped.run(*prompts)
    for precision in ("int3", "float32"):
        for layer in range(3):
            swapped.swap(layer, precision)
        other = swapped.run(*prompts)
    assert other == expected
    hits = swapped.core.snapshot.prefix_hits
    assert swapped.run(*prompts) == expected
    assert swapped.core.snapshot.prefix_hits > hits, "pages of full precision are found again"


@pytest.fixture(scope="module")
def prepared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with AWQ variants in int8 and large scales for some channels of the values."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copy(tiny_model / "config.json", folder)
    dummy, rng = open_checkpoint(tiny_model, "dummy"), np.random.default_rng(0)
    shapes = {n: shape for block in dummy.config.block_ids for n, shape in tensor_shapes(dummy.config, block).items()}
    tensors = {name: dummy.store.get(name, shape) for name, shape in shapes.items()}
    for name in (name for name in tensors if "v_proj" in name):
        tensors[name] = tensors[name] * np.exp(rng.normal(0, 2, (32, 1))).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    checkpoint, text = open_checkpoint(folder), rng.integers(3, 499, (8, 64)).astype(np.int32)
    writer = VariantWriter(folder / "variants", checkpoint, {"int8": Method("awq", 32, True)})
    for variant in quantize_layers(checkpoint, QuantizationSettings(("int8",), "awq", 32), text):
        writer.add(*variant)
    writer.finish()
    return folder


def test_calibrated_layer_reads_kv_cached_in_full_precision(prepared: Path) -> None:
    options = OPTIONS | {"load_format": "auto", "warmup": False}
    built = build(EngineConfig(model=prepared, variants=("int8",), **options))
    swapped = Swapped(built)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def run(*, swap: bool) -> list[tuple[int, float]]:
        """Return tokens and log-probabilities of a request, during which all layers may be swapped."""
        swapped.engine.add(TokensPrompt(prompt(8, 100)), params)
        found: list[tuple[int, float]] = []
        while not swapped.engine.idle:
            for output in swapped.engine.step():
                (piece,) = output.outputs
                found += [(t, e[t].logprob) for t, e in zip(piece.token_ids, piece.logprobs, strict=True)]
            if swap and found and swapped.precisions[0] != "int8":
                for layer in range(3):
                    swapped.swap(layer, "int8")
        return found

    full, mixed = run(swap=False), run(swap=True)
    built.close()
    assert [token for token, _ in mixed] == [token for token, _ in full]
    assert [logprob for _, logprob in mixed] == pytest.approx([logprob for _, logprob in full], abs=0.005)


def test_pages_of_other_precisions_are_not_found(swapped: Swapped) -> None:
    p = prompt(4, 60)
    swapped.run(p)
    swapped.swap(1, "int3")
    hits = swapped.core.snapshot.prefix_hits
    first = swapped.run(p)
    assert swapped.core.snapshot.prefix_hits == hits
    assert swapped.run(p) == first
    assert swapped.core.snapshot.prefix_hits == hits + 48


def test_pages_of_a_request_during_a_swap_are_not_shared(swapped: Swapped) -> None:
    p = prompt(5, 40)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    request = swapped.engine.add(TokensPrompt(p), params)
    tokens: list[int] = []
    while not swapped.engine.idle:
        for output in swapped.engine.step():
            assert output.request_id == request
            tokens += output.outputs[0].token_ids
        if len(tokens) == 20 and swapped.precisions[0] == "float32":
            swapped.swap(0, "int3")
    whole = (*p, *tokens)
    hits = swapped.core.snapshot.prefix_hits
    first = swapped.logprob(whole)
    assert swapped.core.snapshot.prefix_hits == hits, "not under the new precisions"
    assert swapped.logprob(whole) == pytest.approx(first, abs=1e-4), "nor behind pages that others have added since"
    hits = swapped.core.snapshot.prefix_hits
    swapped.swap(0, "float32")
    swapped.run(whole)
    found = swapped.core.snapshot.prefix_hits - hits
    assert 0 < found <= 60, "under the old one, only what was computed before the change"


def test_preempted_request_restarts_under_the_new_precisions(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, kv_pages=12, max_model_len=128, warmup=False, **OPTIONS))
    swapped = Swapped(built)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    ids = [swapped.engine.add(TokensPrompt(prompt(i, 40)), params) for i in range(3)]
    done, preempted = {}, 0
    while not swapped.engine.idle:
        for output in swapped.engine.step():
            done[output.request_id] = done.get(output.request_id, 0) + len(output.outputs[0].token_ids)
        preemptions = swapped.core.scheduler.num_preemptions
        if preemptions > preempted:
            preempted = preemptions
            swapped.swap(0, "int4" if swapped.precisions[0] == "float32" else "float32")
    assert preempted
    assert done == dict.fromkeys(ids, 60)
    assert swapped.core.scheduler.pages.used == 0
    built.close()


def test_metrics_follow_a_swap(swapped: Swapped) -> None:
    def value(name: str) -> float:
        lines = swapped.built.metrics.render().decode().splitlines()
        (line,) = [line for line in lines if line.startswith(f"jaxserve_{name}") and "_created" not in line]
        return float(line.rpartition(" ")[2])

    full = value("weight_bytes")
    swapped.swap(1, "int4")
    label = '{engine="0",model_name="' + swapped.built.info.name + '",precision="int4"}'
    assert value(f"layers_by_precision{label}") == 1
    assert value("weight_bytes") < full
    assert value("weight_bytes") == sum(leaf.nbytes for loaded in swapped.executor.blocks for leaf in loaded.leaves)


@pytest.mark.parametrize("degrees", [{}, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}])
def test_ledger_shares_variants_between_instances_and_reserves_room_for_copies(
    tiny_model: Path, degrees: dict[str, int]
) -> None:
    """On CPU only full precision is copied. Where a layer is split, all of it is read before its parts are made."""
    resolved = resolve(EngineConfig(model=tiny_model, variants=VARIANTS, **(OPTIONS | {"memory_gb": 8} | degrees)))
    entries, sizes, instances = resolved.ledger.entries, resolved.layer_bytes, degrees.get("dp", 1)
    assert entries.get("exchange", 0) == (sizes["layers.0", "float32"] if "tp" in degrees else 0)
    held = [size for (_, precision), size in sizes.items() if precision in VARIANTS]
    assert entries["variants"] == sum(ceil_div(size, instances) for size in held)
    share = ceil_div(sizes["layers.0", "int4"], instances)
    plan = resolved.plan.with_precisions("0", {"layers.0": "int4"})
    for device in resolved.device_entries(plan.instances[0]).values():
        assert device["weights"] == entries["weights"] - sizes["layers.0", "float32"] + share
        assert device["variants"] == entries["variants"] - share


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.99, 0.0), (1.0, 1.0), (2.5, 2.5), (9.0, 3.0)])
def test_swap_buffer_has_room_for_whole_layers_where_all_are_copied(
    tiny_model: Path, share: float, expected: float
) -> None:
    """It takes what it may, up to the second largest variants of all layers, and nothing if none fits."""
    resolved = resolve(EngineConfig(model=tiny_model, variants=VARIANTS, **OPTIONS))
    (stage,) = resolved.plan.instances[0].stages
    sizes = SimpleNamespace(
        config=resolved.padded_model,
        page=1,
        block=lambda *key: resolved.layer_bytes.get(key, 0),
        dequantized=lambda *key: 0,
    )
    layers = {block.block: resolved.variants for block in stage.blocks if is_layer(block.block)}
    *_, second, _ = sorted(size for (layer, _), size in resolved.layer_bytes.items() if layer == "layers.0")
    given = Degrees(1, 1), layers, resolved.buckets, 1, PinnedVariants()
    memory = ModelSizes(lambda tp: sizes, *given, swap_room=int(share * second)).fixed(stage)
    assert memory.exchange == int(expected * second)
    assert memory.variants == 0


@pytest.mark.parametrize("split", [{}, SPLIT | {"pp": 2}])
def test_warm_up_fuses_the_plans_that_the_policy_foresees(tiny_model: Path, split: dict) -> None:
    config = EngineConfig(model=tiny_model, policy="morph-performance", max_quality_loss=math.inf, **(OPTIONS | split))
    built = build(config)
    swapped, before = Swapped(built), dict(built.compilations.counts)
    fused, shapes = fused_tier_of(swapped.executor), swapped.executor.buckets.all()
    decodes = {
        (stage, shape) for stage in range(len(stages_of(swapped.executor))) for shape in shapes if not shape.tiles
    }

    def ready() -> set:
        """Return stages and shapes with an executable for the present precisions."""
        stages = stages_of(swapped.executor)
        return {at for at in decodes if fused.find((*at, stages[at[0]].executables, 1)) is not None}

    assert ready() == decodes
    swapped.swap(1, "int4")
    assert ready() < decodes, "on the way there it is not"
    for layer in (0, 2):
        swapped.swap(layer, "int4")
    assert ready() == decodes
    tokens = swapped.run(prompt(3, 30))
    assert built.compilations.counts == before
    assert tokens == [Reference(tiny_model, dict.fromkeys(range(3), "int4")).greedy(prompt(3, 30), 12)]
    built.close()
