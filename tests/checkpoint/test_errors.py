"""Every defect of a checkpoint is one error that names the file and the tensor."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.local import with_local_files
from jaxserve.checkpoint.values import check_values, largest_magnitude
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CheckpointError, ConfigError
from tests.golden.model import golden

TENSOR = "model.layers.1.mlp.down_proj.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return golden("llama2").write(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return golden("llama2").write(tmp_path / "sharded", shards=3)


def refused(path: Path, *words: str, **kwargs) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path, **kwargs)
    for word in words:
        assert word in str(error.value)


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(path: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(path / SINGLE) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, path / SINGLE)


def test_unsupported_architecture_lists_the_supported_ones(single: Path):
    edit_config(single, architectures=["MambaForCausalLM"])
    refused(single, "config.json", "MambaForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": [2]}}, "factor is [2]"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2}}, "['linear']"),
        ({"quantization_config": "gptq"}, "wrong type"),
    ],
)
def test_error_for_an_unsupported_configuration_names_the_key(single: Path, changes: dict, word: str):
    edit_config(single, **changes)
    refused(single, "config.json", word)


def test_error_for_a_missing_directory_says_what_a_model_is():
    refused(Path("models/llama"), "models/llama: no such directory", "or a name on Hugging Face's hub such as Qwen/")


@pytest.mark.parametrize("address", ["https://huggingface.co/org/name/tree/main", "hf.co/org/name"])
def test_address_of_a_page_of_the_hub_is_answered_with_the_name(address: str):
    refused(Path(address), "is an address: give the model's name alone, org/name")


def test_empty_name_of_a_model_is_not_the_current_folder():
    with pytest.raises(ConfigError, match="model is '': give a folder or a name"):
        with_local_files(EngineConfig(model=""))


@pytest.mark.parametrize("file", ["config.json", SINGLE, "generation_config.json"])
def test_pointer_of_git_lfs_is_refused_by_name(single: Path, file: str):
    (single / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5000000000\n")
    refused(single, f"{file}: is only Git LFS's pointer", "git lfs pull")


def test_missing_config_is_an_error(single: Path):
    (single / "config.json").unlink()
    refused(single, "config.json")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_malformed_config_is_an_error(single: Path, text: str):
    (single / "config.json").write_text(text)
    refused(single, "config.json", "JSON")


def test_directory_without_weights_is_an_error(single: Path):
    (single / SINGLE).unlink()
    refused(single, SINGLE, INDEX)


def test_pickles_are_refused_by_name(single: Path):
    (single / SINGLE).rename(single / "pytorch_model.bin")
    refused(single, "pytorch_model.bin", "pickle", "safetensors")


def test_missing_tensor_is_an_error(single: Path):
    edit_tensors(single, **{TENSOR: None})
    refused(single, SINGLE, TENSOR, "missing")


def test_missing_head_without_tied_embeddings_is_an_error(single: Path):
    edit_tensors(single, **{"lm_head.weight": None})
    refused(single, SINGLE, "lm_head.weight")


def test_error_for_a_misshaped_tensor_names_both_shapes(single: Path):
    edit_tensors(single, **{TENSOR: np.zeros((48, 87), np.float32)})
    refused(single, SINGLE, TENSOR, "[48, 87]", "[48, 88]")


def test_tensor_of_an_unsupported_dtype_is_an_error(single: Path):
    edit_tensors(single, **{TENSOR: np.zeros((48, 88), np.int8)})
    refused(single, SINGLE, TENSOR, "I8", "BF16")


def test_error_for_a_truncated_file_names_the_truncated_tensor(single: Path):
    file = single / SINGLE
    file.write_bytes(file.read_bytes()[:-10])
    entries = json.loads(file.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    last = max((name for name in entries if name != "__metadata__"), key=lambda n: entries[n]["data_offsets"][1])
    refused(single, SINGLE, last, "truncated")


@pytest.mark.parametrize("size", [0, 5, 100])
def test_file_truncated_in_its_header_is_an_error(single: Path, size: int):
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:size])
    refused(single, SINGLE)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", ["JSON"]),
        (b"[]", ["JSON object"]),
        (b'{"model.embed_tokens.weight": 3}', ["model.embed_tokens.weight", "malformed"]),
        (b'{"model.embed_tokens.weight": {"dtype": "F32"}}', ["model.embed_tokens.weight", "malformed"]),
        (b'{"model.embed_tokens.weight": {"dtype": [], "shape": [], "data_offsets": [0, 0]}}', ["malformed"]),
    ],
)
def test_malformed_header_is_an_error(single: Path, header: bytes, words: list[str]):
    (single / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    refused(single, SINGLE, *words)


@pytest.mark.parametrize("offsets", [[-8, 4], [0, 4], [4, 0]])
def test_byte_range_contradicting_the_shape_is_an_error(single: Path, offsets: list[int]):
    names = golden("llama2").tensors
    header = {n: {"dtype": "F32", "shape": s, "data_offsets": offsets} for n, s in names.items()}
    data = json.dumps(header).encode()
    (single / SINGLE).write_bytes(len(data).to_bytes(8, "little") + data + bytes(10_000))
    refused(single, SINGLE, "model.embed_tokens.weight", "byte range")


def test_error_for_a_missing_shard_names_the_file_and_a_tensor(sharded: Path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "model-00002-of-00003.safetensors", "missing", "tensor ")


def test_tensor_missing_from_its_shard_is_an_error(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][TENSOR])
    index["weight_map"][TENSOR] = other
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, other, TENSOR, "missing")


def test_tensor_missing_from_the_index_is_an_error(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"][TENSOR]
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, INDEX, TENSOR, "missing")


@pytest.mark.parametrize("form", ["../single/{}", "{parent}/{}", "./{}", "", 7, None, "pytorch_model.bin"])
def test_index_naming_files_outside_the_directory_is_refused(single: Path, tmp_path: Path, form):
    evil = tmp_path / "evil"
    evil.mkdir()
    shutil.copy(single / "config.json", evil)
    shutil.copy(single / SINGLE, evil)
    name = form.format(SINGLE, parent=single) if isinstance(form, str) else form
    index = {"weight_map": dict.fromkeys(golden("llama2").tensors, name)}
    (evil / INDEX).write_text(json.dumps(index))
    refused(evil, INDEX, "tensor ", repr(name))


@pytest.mark.parametrize("index", [{}, {"weight_map": []}])
def test_index_without_a_weight_map_is_an_error(sharded: Path, index: dict):
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, INDEX, "weight_map")


def test_unreadable_generation_config_is_an_error(single: Path):
    (single / "generation_config.json").write_text("not json")
    refused(single, "generation_config.json")


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_max_magnitude_of_any_float_dtype_is_exact(kind: type, sign: int):
    values = (np.random.default_rng(0).normal(size=(3, 5)) * sign).astype(kind)
    assert largest_magnitude(values) == np.abs(values).max()
    assert largest_magnitude(np.full((2, 2), -0.0, kind)) == 0
    for bad in (np.nan, np.inf, -np.inf, np.copysign(np.nan, -1)):
        values[1, 2] = bad
        assert not np.isfinite(largest_magnitude(values))


@pytest.mark.parametrize(("kind", "value", "fits"), [
    (np.float32, 65504, True), (np.float32, -65519, True), (np.float32, -65520, False), (np.float32, 1e6, False),
    (ml_dtypes.bfloat16, 65280, True), (ml_dtypes.bfloat16, -65536, False), (np.float16, 65504, True),
])  # fmt: skip
def test_error_for_a_value_beyond_float16_names_the_tensor(kind: type, value: float, fits: bool):
    tensor = np.array([1, value, np.inf if kind is np.float16 else 2], kind)
    if fits:
        check_values("a.weight", tensor, np.dtype(np.float16))
        return
    with pytest.raises(CheckpointError, match=r"a.weight holds a value .* float16 cannot .*--dtype bfloat16"):
        check_values("a.weight", tensor, np.dtype(np.float16))
    check_values("a.weight", tensor, np.dtype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_value_beyond_every_dtype_gives_no_advice(dtype: type):
    with pytest.raises(CheckpointError, match=f"which {np.dtype(dtype)} cannot represent$"):
        check_values("a.weight", np.array([1e300, 0]), np.dtype(dtype))


def test_float16_overflow_next_to_an_infinity_is_refused(caplog: pytest.LogCaptureFixture):
    with pytest.raises(CheckpointError, match="magnitude 70000"):
        check_values("a.weight", np.array([np.inf, -70000], np.float32), np.dtype(np.float16))
    check_values("b.weight", np.array([np.nan, 1], np.float32), np.dtype(np.float32))
    assert "b.weight holds NaN or infinity" in caplog.text


def test_load_checks_every_tensor_for_overflow(tmp_path: Path):
    folder = golden("llama2").write(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, file)
    checkpoint = open_checkpoint(folder, dtype="float16")
    checkpoint.block("layers.0")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds a value of magnitude 100000"):
        checkpoint.block("layers.1")
    open_checkpoint(folder, dtype="bfloat16").block("layers.1")
