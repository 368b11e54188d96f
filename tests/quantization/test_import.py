"""Checkpoints quantised by other projects: every layout decodes to the weights that were packed."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import imported, open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.core.errors import CheckpointError
from jaxserve.models import config_from_hf
from jaxserve.parallel.padding import padded_config
from jaxserve.quantization import QArray
from tests.conftest import TINY
from tests.quantization.foreign import write

LAYOUTS = [("awq", 4), ("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("pack_quantized", 4), ("pack_quantized", 8),
           ("int_quantized", 8)]  # fmt: skip
CONFIG = config_from_hf(TINY)
SHAPES = {name: shape for block in CONFIG.block_ids for name, shape in tensor_shapes(CONFIG, block).items()}
LAYER = "model.layers.1."
MOE = TINY | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8,
              "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip


def dense(q: QArray) -> np.ndarray:
    return np.asarray(q.dequantize())


def expected_layer(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the matrices of layer 1 as its modules have them: 2 kv heads, each with 2 query heads, of 16 numbers."""
    q, k, v = (values[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv")
    heads = [
        np.concatenate([q[32 * j : 32 * j + 32], k[16 * j : 16 * j + 16], v[16 * j : 16 * j + 16]]) for j in (0, 1)
    ]
    gate, up = (values[f"{LAYER}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    return {
        "attention.qkv": np.stack(heads).reshape(2, 4, 16, 64),
        "attention.o": values[f"{LAYER}self_attn.o_proj.weight"],
        "mlp.gate_up": np.stack([gate, up])[None],
        "mlp.down": values[f"{LAYER}mlp.down_proj.weight"],
    }


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 0, 128])  # 128 is more than there are inputs
@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_imported_layout_decodes_to_the_packed_weights(tmp_path, layout, bits, group, symmetric):
    values = write(tmp_path, TINY, SHAPES, layout, bits=bits, group=group, symmetric=symmetric)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.precision("layers.1") == f"int{bits}"
    assert checkpoint.precision("embed") == checkpoint.precision("head") == "float32"
    variant, block = checkpoint.variant("layers.1", f"int{bits}"), checkpoint.block("layers.1")
    assert variant.keys() == block.keys()
    for name, w in expected_layer(values).items():
        np.testing.assert_array_equal(dense(variant[name]), w, err_msg=name)
        np.testing.assert_array_equal(block[name].reshape(w.shape), w, err_msg=name)
        assert (variant[name].bits, variant[name].zeros is None) == (bits, symmetric)
    norm = values[f"{LAYER}input_layernorm.weight"]
    np.testing.assert_array_equal(variant["input_norm.weight"], norm)
    np.testing.assert_array_equal(checkpoint.block("embed")["weight"], values["model.embed_tokens.weight"])


def test_imported_layer_in_another_precision_is_rounded_from_the_stored_one(tmp_path):
    write(tmp_path, TINY, SHAPES, "awq")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.variant("layers.0", "int8")["mlp.down"].bits == 8
    assert isinstance(checkpoint.variant("layers.0", "float32")["mlp.down"], np.ndarray)


def test_imported_layer_left_in_full_precision_is_recognised(tmp_path):
    write(tmp_path, TINY, SHAPES, "gptq", skip="layers.0.")
    checkpoint = open_checkpoint(tmp_path)
    assert [checkpoint.precision(f"layers.{i}") for i in range(3)] == ["float32", "int4", "int4"]
    assert [checkpoint.method(f"layers.{i}", "int4") for i in range(3)] == ["rtn", "gptq", "gptq"]
    assert checkpoint.method("layers.1", "int8") == "rtn"


def test_imported_quantised_router_is_dequantised(tmp_path):
    config, router = config_from_hf(MOE), f"{LAYER}mlp.gate.weight"
    shapes = {name: shape for block in config.block_ids for name, shape in tensor_shapes(config, block).items()}
    values = write(tmp_path, MOE, shapes, "awq", ends=("_proj.weight", "mlp.gate.weight"))
    variant = open_checkpoint(tmp_path).variant("layers.1", "int4")
    np.testing.assert_array_equal(variant["mlp.router"], values[router])
    down = [values[f"{LAYER}mlp.experts.{expert}.down_proj.weight"] for expert in range(8)]
    np.testing.assert_array_equal(dense(variant["mlp.experts_down"]), np.stack(down))


def test_imported_layer_is_split_with_its_codes(tmp_path):
    values = write(tmp_path, TINY, SHAPES, "awq")
    two = open_checkpoint(tmp_path).variant("layers.1", "int4", padded_config(CONFIG, 2, unit=32))["mlp.gate_up"]
    np.testing.assert_array_equal(dense(two)[1, 0, :32], values[f"{LAYER}mlp.gate_proj.weight"][64:])
    assert not dense(two)[1, :, 32:].any()


def edit(folder: Path, **changes) -> None:
    """Change quantization_config in config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("layout", "suffix"), [("gptq", "g_idx"), ("pack_quantized", "weight_g_idx")])
def test_activation_order_is_refused_only_where_it_permutes(tmp_path, layout, suffix):
    write(tmp_path, TINY, SHAPES, layout)
    file, name = tmp_path / "model.safetensors", f"model.layers.2.mlp.down_proj.{suffix}"
    edit(tmp_path, desc_act=True)
    tensors = load_file(file)
    save_file(tensors | {name: np.arange(96, dtype=np.int32) // 32}, file)
    open_checkpoint(tmp_path)
    save_file(tensors | {name: np.arange(96, dtype=np.int32) % 3}, file)
    with pytest.raises(CheckpointError, match=rf"{file}: tensor {name} .*activation order.* not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("awq", {"bits": 8}, r"awq in 8 bits is not supported; supported: \(4,\)"),
        ("awq", {"version": "gemv"}, "AWQ version 'gemv'"),
        ("gptq", {"bits": 3}, "gptq in 3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
        (
            "gptq",
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported; supported: awq, gptq, compressed-",
        ),
        ("pack_quantized", {"format": "float-quantized"}, "'float-quantized'"),
        ("pack_quantized", {"config_groups": {}}, "0 config_groups"),
        ("pack_quantized", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ("int_quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        ("awq", {"bits": "four"}, "four"),
    ],
)
def test_error_for_an_unsupported_layout_names_the_supported_ones(tmp_path, layout, changes, message):
    write(tmp_path, TINY, SHAPES, layout)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_neutral_transforms_and_sparsity_are_accepted(tmp_path):
    write(tmp_path, TINY, SHAPES, "pack_quantized")
    edit(tmp_path, transform_config={}, sparsity_config={"format": "dense", "sparsity_structure": "unstructured"})
    assert open_checkpoint(tmp_path).precision("layers.0") == "int4"


def test_error_for_a_missing_or_misshaped_quantised_tensor_names_it(tmp_path):
    write(tmp_path, TINY, SHAPES, "awq")
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.scales"
    tensors = load_file(file)
    save_file(tensors | {name: np.zeros((1, 96), np.float16)}, file)
    with pytest.raises(CheckpointError, match=rf"{file}: tensor {name} has shape \[1, 96\].*\[2, 96\]"):
        open_checkpoint(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_incomplete_last_group_is_refused(tmp_path, layout, bits):
    write(tmp_path, TINY, SHAPES, layout, bits=bits, group=64, symmetric=True)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.down_proj.* has 96 inputs, .* groups of 64 do not divide"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_fingerprint_of_an_imported_checkpoint_decodes_nothing(tmp_path, monkeypatch, part):
    def refuse(*args):
        raise AssertionError("a weight was decoded")

    monkeypatch.setattr(imported, "decode", refuse)
    write(tmp_path, TINY, SHAPES, "awq")
    before = fingerprint(open_checkpoint(tmp_path))
    file, name = tmp_path / "model.safetensors", f"{LAYER}mlp.up_proj.{part}"
    tensors = load_file(file)
    tensors[name][0, 0] += 1
    save_file(tensors, file)
    assert fingerprint(open_checkpoint(tmp_path)) != before


def test_partly_quantised_layer_is_refused(tmp_path):
    write(tmp_path, TINY, SHAPES, "gptq", skip="layers.1.mlp.down_proj")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is not quantised"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("layout", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_quantisation_settings_in_their_own_file_are_read(tmp_path, layout, file):
    write(tmp_path, TINY, SHAPES, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    if layout == "awq":  # as AutoAWQ writes them
        settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(json.dumps(settings))
    assert open_checkpoint(tmp_path).precision("layers.1") == "int4"


def test_contradicting_quantisation_settings_give_a_warning(tmp_path, caplog):
    write(tmp_path, TINY, SHAPES, "gptq")
    (tmp_path / "quantize_config.json").write_text('{"bits": 8, "group_size": 32, "sym": false}')
    assert open_checkpoint(tmp_path).precision("layers.1") == "int4"
    assert "bits is 4 in config.json, which is used, and 8 in quantize_config.json" in caplog.text
    assert "group_size" not in caplog.text


def test_quantisation_settings_under_their_older_name_are_read(tmp_path):
    write(tmp_path, TINY, SHAPES, "pack_quantized")
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).precision("layers.1") == "int4"


def test_unknown_biases_give_a_warning_unless_zero(tmp_path, caplog):
    write(tmp_path, TINY, SHAPES, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{LAYER}self_attn.q_proj.bias"] = np.zeros(64, np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)
    assert not caplog.records
    tensors[f"{LAYER}self_attn.q_proj.bias"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)
    assert "1 tensors are not part of LlamaForCausalLM" in caplog.text
    assert "self_attn.q_proj.bias" in caplog.text
