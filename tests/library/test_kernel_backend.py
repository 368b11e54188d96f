"""The option `kernel_backend`, which chooses what runs a model's operations."""

import json
from pathlib import Path

import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.build import build
from jaxserve.kernels import native
from jaxserve.kernels.native.library import MATMUL, WRITE_AND_ATTEND
from jaxserve.planning.resolve import resolve
from tests.golden.cases import CASES
from tests.support.internals import stage_on_padding
from tests.support.reference import Reference

OPTIONS = {
    "load_format": "dummy", "warmup": False, "memory_gb": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4 + 32,
}  # fmt: skip
without_native = pytest.mark.skipif(not native.targets(), reason="needs the native library")


def layer_program(model: Path, **options: object) -> str:
    """Return a layer's program for the smallest step, before XLA has compiled it."""
    built = build(EngineConfig(model=model, **OPTIONS, **options))
    try:
        executor = built.instances[0].executor
        step = stage_on_padding(executor, executor.buckets.all()[-1])
        layer = step.stage.layers[0]
        return layer.executable.lower(step.x, *step.context, executor.pools[0], *layer.leaves).as_text()
    finally:
        built.close()


@without_native
@pytest.mark.parametrize("tp", [1, 2])
def test_kernel_backend_decides_the_attention_kernel(tiny_model: Path, tp: int) -> None:
    assert WRITE_AND_ATTEND in layer_program(tiny_model, tp=tp)
    assert WRITE_AND_ATTEND in layer_program(tiny_model, tp=tp, kernel_backend="native")
    assert WRITE_AND_ATTEND not in layer_program(tiny_model, tp=tp, kernel_backend="xla")


@without_native
def test_kernel_backend_decides_the_matmul_kernel(tiny_model: Path) -> None:
    assert MATMUL in layer_program(tiny_model, precision="int4")
    assert MATMUL in layer_program(tiny_model, precision="int4", kernel_backend="native")
    assert MATMUL not in layer_program(tiny_model, precision="int4", kernel_backend="xla")


@without_native
def test_kernel_backend_decides_the_experts_matmul_kernel(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["qwen3_moe"]))
    options = {"precision": "int4", "dtype": "float32"}
    assert MATMUL in layer_program(tmp_path, **options)
    assert MATMUL not in layer_program(tmp_path, kernel_backend="xla", **options)


@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=without_native)])
def test_every_kernel_backend_gives_the_same_tokens(tiny_model: Path, reference: Reference, backend: str) -> None:
    prompt = list(range(3, 60))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tiny_model, kernel_backend=backend, **OPTIONS) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(prompt, 8)


@pytest.mark.parametrize(
    ("backend", "message"),
    [("pallas", "'pallas', which runs on gpu: the devices are cpu"), ("cuda", "one of auto, native, pallas, xla")],
)
def test_kernel_backend_of_another_platform_is_refused(tiny_model: Path, backend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model=tiny_model, kernel_backend=backend, **OPTIONS))


def test_missing_native_kernels_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "targets", frozenset)
    with pytest.raises(ConfigError, match="the native kernels are missing"):
        resolve(EngineConfig(model=tiny_model, kernel_backend="native", **OPTIONS))
    assert resolve(EngineConfig(model=tiny_model, **OPTIONS)).padded_model.kernel_backend == "auto"
