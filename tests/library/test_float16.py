"""Checkpoints in float16, as most published AWQ and GPTQ ones are: the dtype they are computed in, and the error."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.models import config_from_hf
from jaxserve.planning.resolve import resolve
from jaxserve.planning.spec import dtype_of
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape
from tests.conftest import TINY
from tests.quantization import foreign
from tests.support.reference import Reference

FLOAT16 = TINY | {"torch_dtype": "float16"}
OPTIONS = {"warmup": False, "max_num_seqs": 4, "memory_gb": 4}
PROMPT = np.random.default_rng(0).integers(3, 499, 80).tolist()
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of one model in float16 as AWQ and GPTQ write it, and without quantisation."""
    config, made = config_from_hf(FLOAT16), {}
    shapes = {name: shape for block in config.block_ids for name, shape in tensor_shapes(config, block).items()}
    for layout in ("awq", "gptq"):
        made[layout] = tmp_path_factory.mktemp(layout)
        values = foreign.write(made[layout], FLOAT16, shapes, layout)
        in_float16(made[layout] / "model.safetensors")
    made["plain"] = tmp_path_factory.mktemp("plain")
    (made["plain"] / "config.json").write_text(json.dumps(FLOAT16))
    save_file({name: value.astype(np.float16) for name, value in values.items()}, made["plain"] / "model.safetensors")
    return made


def in_float16(file: Path) -> None:
    tensors = load_file(file)
    save_file({n: x.astype(np.float16) if x.dtype == np.float32 else x for n, x in tensors.items()}, file)


def scores(folder: Path, **options) -> np.ndarray:
    """Return log-probabilities of the prompt's tokens by the engine."""
    with LLM(folder, **OPTIONS, **options) as llm:
        (output,) = llm.generate([PROMPT], SCORED, use_tqdm=False)
    return np.array([e[t].logprob for t, e in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)])


@pytest.mark.parametrize("kind", ["plain", "awq", "gptq"])
def test_float16_checkpoint_is_computed_in_bfloat16_on_cpu_with_a_message(folders: dict, kind: str, caplog) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        got = scores(folders[kind])
    assert "the checkpoint is in float16 and is computed in bfloat16" in caplog.text
    assert "--dtype float16 keeps it" in caplog.text
    reference = Reference(folders[kind], load_format="safetensors", dtype="float32").logprobs(PROMPT)
    expected = reference[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected - expected.mean()) < 0.05
    assert np.array_equal(got, scores(folders[kind], dtype="bfloat16")), "nothing of it is left in float16"


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"tp": 2}, {"variants": ("int4",)}])
def test_float16_checkpoints_other_settings_follow_the_computed_dtype(folders: dict, options: dict) -> None:
    resolved = resolve(EngineConfig(model=folders["plain"], **OPTIONS, **options))
    assert {block.precision for block in resolved.plan.instances[0].blocks} == {"bfloat16"}
    assert resolved.padded_model.dtype == "bfloat16"
    assert resolved.kv_dtype == options.get("kv_cache_dtype", "bfloat16")
    quantized = resolve(EngineConfig(model=folders["awq"], **OPTIONS, **options))
    assert [block.precision for block in quantized.plan.instances[0].blocks] == ["bfloat16", *["int4"] * 3, "bfloat16"]


def test_requested_float16_is_kept_with_a_warning(folders: dict, caplog) -> None:
    resolved = resolve(EngineConfig(model=folders["plain"], dtype="float16", **OPTIONS))
    assert resolved.padded_model.dtype == resolved.kv_dtype == "float16"
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "dtype is float16, which is much slower than bfloat16 here" in record.getMessage()
    caplog.clear()
    resolve(EngineConfig(model=folders["plain"], dtype="float32", **OPTIONS))
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "platform", "layer", "expected"),
    [
        ({}, "cpu", "float16", "bfloat16"),
        ({}, "tpu", "float16", "bfloat16"),
        ({}, "gpu", "float16", "float16"),
        ({}, "gpu", "int4", "bfloat16"),
        ({"precision": "int8"}, "gpu", "float16", "bfloat16"),
        ({"head_precision": "int8"}, "gpu", "float16", "bfloat16"),
        ({"layer_precision": "0:auto,1-:int4"}, "gpu", "float16", "bfloat16"),
        ({"variants": ("int4",)}, "gpu", "float16", "bfloat16"),
        ({"policy": "morph"}, "gpu", "float16", "bfloat16"),
        ({"head_precision": "bfloat16"}, "gpu", "float16", "bfloat16"),
        ({"layer_precision": "0:fp16,1-:int4"}, "cpu", "float16", "float16"),
        ({"dtype": "float16"}, "cpu", "int4", "float16"),
        ({"dtype": "float32"}, "gpu", "float16", "float32"),
    ],
)
def test_float16_checkpoint_is_computed_in_the_platforms_dtype(
    options: dict, platform: str, layer: str, expected: str
) -> None:
    assert dtype_of(EngineConfig(**options), "float16", (layer,), platform) == expected


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_other_checkpoints_keep_their_dtype(stored: str) -> None:
    for platform in ("cpu", "gpu"):
        assert dtype_of(EngineConfig(policy="morph"), stored, ("int4",), platform) == stored


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "float16"), ({"policy": "morph"}, "bfloat16"), ({"head_precision": "bfloat16"}, "bfloat16")],
)
def test_simulator_chooses_the_engines_dtype(options: dict, expected: str) -> None:
    shape = ModelShape.load("llama-2-7b")
    assert shape.dtype == "float16"
    cluster = resolve_cluster(EngineConfig(**options), shape, load_hardware("h200"))
    assert (cluster.shape.dtype, cluster.memory.plan.instances[0].blocks[-1].precision) == (expected, expected)
