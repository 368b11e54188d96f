"""Checkpoints give the right numbers, one block at a time, in little memory."""

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.models import build_block
from tests.golden.cases import CASES
from tests.golden.model import golden

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def nbytes(block: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in block.values())


@pytest.mark.parametrize("name", CASES)
def test_blocks_have_the_shapes_and_dtypes_of_their_modules(name: str, tmp_path: Path):
    checkpoint = open_checkpoint(golden(name).write(tmp_path))
    for block_id in checkpoint.config.block_ids:
        module = nnx.eval_shape(lambda b=block_id: build_block(checkpoint.config, b, rngs=nnx.Rngs(0)))
        expected = {
            ".".join(map(str, path)): (leaf.shape, leaf.dtype) for path, leaf in nnx.to_flat_state(nnx.state(module))
        }
        found = {path: (array.shape, array.dtype) for path, array in checkpoint.block(block_id).items()}
        assert found == expected


@pytest.mark.parametrize("name", ["llama2", "qwen3_moe"])
def test_shards_equal_a_single_file(name: str, tmp_path: Path):
    one = open_checkpoint(golden(name).write(tmp_path / "one"))
    three = open_checkpoint(golden(name).write(tmp_path / "three", shards=3))
    assert not (tmp_path / "three" / "model.safetensors").exists()
    for block_id in one.config.block_ids:
        a, b = one.block(block_id), three.block(block_id)
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)


def test_stacked_experts_equal_separate_ones(tmp_path: Path):
    case = golden("qwen3_moe")
    separate = open_checkpoint(case.write(tmp_path / "separate"), dtype="float32")
    tensors = load_file(tmp_path / "separate" / "model.safetensors")
    for layer in range(separate.config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        expert = {
            name: np.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(8)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate((expert["gate"], expert["up"]), axis=1)
        tensors[f"{prefix}.down_proj"] = expert["down"]
    folder = tmp_path / "stacked"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((tmp_path / "separate" / "config.json").read_text())
    stacked = open_checkpoint(folder, dtype="float32")
    for key, array in separate.block("layers.1").items():
        np.testing.assert_array_equal(stacked.block("layers.1")[key], array)


def test_fused_parameters_hold_every_head_in_its_place(tmp_path: Path):
    checkpoint = open_checkpoint(golden("llama3").write(tmp_path), dtype="float32")
    tensors, block = load_file(tmp_path / "model.safetensors"), checkpoint.block("layers.2")
    attention = {name: tensors[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkvo"}
    head = slice(4 * 8, 5 * 8)  # query head 4 is head 1 of kv head 1's group of 3
    np.testing.assert_array_equal(block["attention.qkv"][1, 1], attention["q"][head])
    np.testing.assert_array_equal(block["attention.qkv"][1, 3], attention["k"][8:16])
    np.testing.assert_array_equal(block["attention.qkv"][1, 4], attention["v"][8:16])
    np.testing.assert_array_equal(block["attention.o"][:, 1, 1], attention["o"][:, head])
    np.testing.assert_array_equal(block["mlp.gate_up"][0, 1, 5], tensors["model.layers.2.mlp.up_proj.weight"][5])


def test_tied_head_is_the_embedding(tmp_path: Path):
    checkpoint = open_checkpoint(golden("llama3").write(tmp_path))
    assert checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(checkpoint.block("head")["weight"], checkpoint.block("embed")["weight"])


@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_tensors_are_cast_to_the_requested_dtype(stored: type, wanted: str, tmp_path: Path):
    path = golden("llama2").write(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: value.astype(stored) for name, value in tensors.items()}, path / "model.safetensors")
    checkpoint = open_checkpoint(path, dtype=wanted)
    embedding = checkpoint.block("embed")["weight"]
    assert checkpoint.config.dtype == wanted == embedding.dtype.name
    expected = tensors["model.embed_tokens.weight"].astype(stored).astype(embedding.dtype)
    np.testing.assert_array_equal(embedding, expected)


def test_generation_config_overrides_the_end_of_sequence(tmp_path: Path):
    path = golden("llama2").write(tmp_path)
    assert open_checkpoint(path).config.eos_token_ids == (2,)
    assert open_checkpoint(path).generation == {}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.eos_token_ids == (7, 9)
    assert checkpoint.generation["temperature"] == 0.6


def test_blocks_do_not_alias_the_file(tmp_path: Path):
    """A file that is replaced while serving must not change the weights."""
    path = golden("llama2").write(tmp_path)
    block = open_checkpoint(path, dtype="float32").block("layers.0")
    before = {key: array.copy() for key, array in block.items()}
    file = path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:  # in place, so that the map sees it
        stream.write(bytes(size))
    assert file.stat().st_size == size
    assert all(np.array_equal(block[key], before[key]) for key in block)


def test_streaming_a_checkpoint_needs_at_most_two_layers_of_extra_memory(tmp_path: Path):
    """The test counts what numpy allocates. A memory-mapped file takes none."""
    write_dummy(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layer = nbytes(checkpoint.block("layers.0"))
    model, kept = 0, []
    tracemalloc.start()
    try:
        for block_id in checkpoint.config.block_ids:
            kept.append(checkpoint.block(block_id))
            model += nbytes(kept[-1])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert model > 10 * layer
    assert peak <= model + 2 * layer


def test_opening_a_checkpoint_reads_no_tensor(tmp_path: Path):
    write_dummy(tmp_path)
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes(checkpoint.block("layers.0")) / 4


def write_dummy(path: Path) -> None:
    """Write a 12-layer checkpoint of a few MB per layer in four shards."""
    (path / "config.json").write_text(json.dumps(LARGE))
    dummy = open_checkpoint(path, "dummy")
    shapes = {n: s for b in dummy.config.block_ids for n, s in tensor_shapes(dummy.config, b).items()}
    weight_map = {}
    for shard in range(4):
        names = sorted(shapes)[shard::4]
        save_file({n: dummy.store.get(n, shapes[n]) for n in names}, path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(names, f"{shard}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3_moe_stacked"])
def test_dummy_checkpoint_needs_only_a_config(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CASES[name]))
    checkpoint = open_checkpoint(tmp_path, "dummy", dtype="float32")
    again = open_checkpoint(tmp_path / "config.json", "dummy", dtype="float32")
    first, second = checkpoint.block("layers.0"), checkpoint.block("layers.1")
    qkv = first["attention.qkv"]
    assert qkv.std() == pytest.approx(0.02, rel=0.05)
    assert abs(qkv.mean()) < 0.001
    assert np.array_equal(qkv, again.block("layers.0")["attention.qkv"])
    assert not np.array_equal(qkv, second["attention.qkv"])
    assert np.all(first["input_norm.weight"] == 1)
