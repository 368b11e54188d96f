"""Compilation: none while serving after warm-up, and the fused tier takes over without changing answers."""

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.build import BuiltEngine, build
from jaxserve.compilation.programs import Compiler, Program
from jaxserve.core.config import EngineConfig
from jaxserve.core.progress import COMPILING, LOADING, QUANTISING, READING
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_shapes import Buckets, StepShape
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.fused import FusedTier
from jaxserve.planning import spec
from tests.support.internals import fused_keys, fused_tier_of, watch_blocks
from tests.support.reference import Reference

OPTIONS = {"load_format": "dummy", "max_num_seqs": 8, "max_num_batched_tokens": 8 + 64}


def sync_engine(built: BuiltEngine) -> SyncEngine:
    return SyncEngine(built.loops, built.info, None, built.clock)


def run(engine: SyncEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple[int, ...]]:
    ids = [engine.add(TokensPrompt(tuple(prompt)), params) for prompt, params in requests]
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    while not engine.idle:
        for output in engine.step():
            for answer in output.outputs:
                tokens[output.request_id] += answer.token_ids
    return [tokens[request_id] for request_id in ids]


@pytest.fixture
def built(tiny_model: Path) -> Iterator[BuiltEngine]:
    built = build(EngineConfig(model=tiny_model, **OPTIONS))
    yield built
    built.close()


def test_serving_compiles_nothing_after_warm_up(built: BuiltEngine) -> None:
    check_compiles_nothing(built)


def test_stages_compile_nothing_after_warm_up(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, pp=2, **OPTIONS))
    try:
        check_compiles_nothing(built)
    finally:
        built.close()


def check_compiles_nothing(built: BuiltEngine) -> None:
    engine = sync_engine(built)
    rng = np.random.default_rng(0)
    kinds = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 5, "n": 3},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1},
        {"logit_bias": {5: 1.0}, "min_tokens": 2},
        {"allowed_token_ids": [5, 6]},
        {"allowed_token_ids": [5, 6], "logprobs": 1, "seed": 1},
    )
    before = dict(built.compilations.counts)
    assert before["block"] > 0
    for count in (1, 2, 5, 8, 13):
        requests = []
        for i in range(count):
            prompt = rng.integers(3, 499, int(rng.integers(1, 180))).tolist()
            requests.append((prompt, SamplingParams(max_tokens=int(rng.integers(2, 20)), **kinds[i % len(kinds)])))
        run(engine, requests)
    engine.add(TokensPrompt((3, 4, 5)), SamplingParams(max_tokens=1), embed=True)
    while not engine.idle:
        engine.step()
    assert built.compilations.counts == before


def test_compile_counter_counts_a_new_program(built: BuiltEngine) -> None:
    import jax

    before = built.compilations.counts["block"]
    jax.jit(lambda x: x * 3 + 1)(np.arange(17)).block_until_ready()
    assert built.compilations.counts["block"] > before


def test_warm_up_fuses_all_decode_shapes(built: BuiltEngine) -> None:
    fused = fused_tier_of(built.instances[0].executor)
    shapes = {shape for _, shape, *_ in fused_keys(fused)}
    assert shapes == {shape for shape in built.instances[0].executor.buckets.all() if not shape.tiles}
    assert all(fused.find(key) is not None for key in fused_keys(fused))
    assert built.compilations.counts["fused"] >= len(shapes)


@pytest.mark.parametrize(("fuse", "warmup"), [(False, True), (None, False)])
def test_engine_without_fusion_or_warm_up_fuses_nothing(tiny_model: Path, fuse: bool | None, warmup: bool) -> None:
    built = build(EngineConfig(model=tiny_model, fuse=fuse, warmup=warmup, **OPTIONS))
    assert built.compilations.counts["fused"] == 0
    assert fused_tier_of(built.instances[0].executor) is None
    built.close()


def test_fused_tier_takes_over_without_changing_tokens(tiny_model: Path, reference: Reference) -> None:
    built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    executor = built.instances[0].executor
    engine = sync_engine(built)
    prompt = list(range(3, 40))
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = reference.greedy(prompt, 20)
    assert run(engine, [(prompt, greedy)]) == [expected]
    fused = FusedTier(built.compilations)
    executor.fuse(fused)
    executor.fuse_decodes([block.signature() for block in executor.blocks[1:-1]])
    fused.wait()
    assert built.compilations.counts["fused"] >= 1
    assert all(fused.find(key) is not None for key in fused_keys(fused))
    by_blocks: list[StepShape] = []
    watch_blocks(executor, by_blocks.append)
    assert run(engine, [(prompt, greedy)]) == [expected]
    assert by_blocks, "prompts run block by block"
    assert all(shape.tiles for shape in by_blocks)
    built.close()


def test_mixed_steps_of_few_sequences_sample_few_rows_as_on_gpu(
    tiny_model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "Buckets", lambda *sizes, finer, **options: Buckets(*sizes, **options))
    built = build(EngineConfig(model=tiny_model, **OPTIONS | {"max_num_seqs": 16, "max_num_batched_tokens": 16 + 32}))
    before, shapes = dict(built.compilations.counts), list[StepShape]()
    watch_blocks(built.instances[0].executor, shapes.append)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(3 + i, 43 + i)) for i in range(3)]
    found = run(sync_engine(built), [(prompt, greedy) for prompt in prompts])
    assert found == [reference.greedy(prompt, 12) for prompt in prompts]
    assert built.compilations.counts == before
    assert {shape.rows for shape in shapes if shape.tiles and shape.decodes} == {4}
    built.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"tp": 2, "pp": 2, "kv_cache_dtype": "int8"}, {"dp": 2}, {"variants": ("int8",)}],
    ids=["one device", "tp and pp", "dp", "variants"],
)
def test_second_start_traces_nothing_and_gives_equal_answers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    lowered: list[str] = []
    lower = Program.lower
    monkeypatch.setattr(Program, "lower", lambda self, *given: lowered.append(self.name) or lower(self, *given))
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 32}  # shapes, and so programs
    prompt = list(range(3, 90))
    requests = [
        (prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
        (prompt[:20], SamplingParams(seed=7, top_p=0.9, max_tokens=9, ignore_eos=True)),
        (prompt[:9], SamplingParams(seed=8, presence_penalty=1, logprobs=2, prompt_logprobs=1, max_tokens=5)),
    ]
    answers = []
    for _ in range(2):
        lowered.clear()
        built = build(EngineConfig(model=tiny_model, **OPTIONS | few | options))
        counts = dict(built.compilations.counts)
        assert counts["block"] > 0
        assert counts["fused"] > 0
        answers.append(run(sync_engine(built), requests))
        assert built.compilations.counts == counts, "nothing is compiled or loaded while serving"
        built.close()
    assert lowered == []
    assert answers[0] == answers[1]


def test_programs_count_as_soon_as_they_are_there() -> None:
    reported: list[tuple[str, int, int]] = []
    compiler = Compiler(progress=lambda *how: reported.append(how))
    first, second = Program("first", jax.jit(lambda x: x + 1)), Program("second", jax.jit(lambda x: x + 2))
    compiler.compile(first, "key", np.zeros(3, np.float32))
    deadline = time.monotonic() + 60
    while "key" not in first.executables:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    compiler.compile(second, "key", np.zeros(3, np.float32))
    _, done, total = reported[-1]
    assert done >= 1
    assert total == 2
    compiler.wait()
    assert reported[-1][1:] == (2, 2)


def test_start_reports_its_progress(tiny_model: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    built = build(
        EngineConfig(model=tiny_model, precision="int8", **OPTIONS), progress=lambda *how: reported.append(how)
    )
    doing = list(dict.fromkeys(what for what, *_ in reported))
    assert doing[:2] == [READING, QUANTISING]  # the embedding, then layers
    assert doing[-1] in (LOADING, COMPILING)
    assert reported[-1][1] == reported[-1][2] > 0
    assert all(done <= total for _, done, total in reported)
    built.close()
