"""`kernel_backend`: what may run the operations of a model, chosen from outside."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.build import build
from jaxserve.kernels import native
from jaxserve.kernels.native.library import MATMUL, WRITE_AND_ATTEND
from jaxserve.planning.resolve import resolve
from tests.golden.cases import CASES
from tests.reference import Reference

OPTIONS = {
    "load_format": "dummy", "warmup": False, "memory_gb": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4 + 32,
}  # fmt: skip
without_native = pytest.mark.skipif(not native.targets(), reason="the native library has not been built")


def layer_program(model: Path, **options: object) -> str:
    """A layer's program for the smallest step, before XLA has seen it."""
    built = build(EngineConfig(model=model, **OPTIONS, **options))
    try:
        executor = built.instances[0].executor
        stage, shape = executor._stages[0], executor.buckets.all()[-1]
        tokens, _, *context = executor._inputs[stage.placement](np.zeros(shape.size, np.int32), shape)
        x = stage.embed.executable(tokens, executor.sampler.newest, *stage.embed.leaves)
        return stage.layers[0].executable.lower(x, *context, executor.pools[0], *stage.layers[0].leaves).as_text()
    finally:
        built.close()


@without_native
@pytest.mark.parametrize("tp", [1, 2])
def test_a_choice_reaches_attention(tiny_model: Path, tp: int) -> None:
    assert WRITE_AND_ATTEND in layer_program(tiny_model, tp=tp)
    assert WRITE_AND_ATTEND in layer_program(tiny_model, tp=tp, kernel_backend="native")
    assert WRITE_AND_ATTEND not in layer_program(tiny_model, tp=tp, kernel_backend="xla")


@without_native
def test_a_choice_reaches_products(tiny_model: Path) -> None:
    assert MATMUL in layer_program(tiny_model, precision="int4")
    assert MATMUL in layer_program(tiny_model, precision="int4", kernel_backend="native")
    assert MATMUL not in layer_program(tiny_model, precision="int4", kernel_backend="xla")


@without_native
def test_a_choice_reaches_the_products_of_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["qwen3_moe"]))
    options = {"precision": "int4", "dtype": "float32"}
    assert MATMUL in layer_program(tmp_path, **options)
    assert MATMUL not in layer_program(tmp_path, kernel_backend="xla", **options)


@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=without_native)])
def test_every_backend_says_the_same(tiny_model: Path, reference: Reference, backend: str) -> None:
    prompt = list(range(3, 60))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tiny_model, kernel_backend=backend, **OPTIONS) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(prompt, 8)


@pytest.mark.parametrize(
    ("backend", "message"),
    [("pallas", "'pallas', which runs on gpu: the devices are cpu"), ("cuda", "one of auto, native, pallas, xla")],
)
def test_kernels_that_cannot_run_here_are_refused(tiny_model: Path, backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model=tiny_model, kernel_backend=backend, **OPTIONS))


def test_native_kernels_that_are_not_there_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "targets", frozenset)
    with pytest.raises(ConfigError, match="the native kernels are missing"):
        resolve(EngineConfig(model=tiny_model, kernel_backend="native", **OPTIONS))
    assert resolve(EngineConfig(model=tiny_model, **OPTIONS)).padded_model.kernel_backend == "auto"
