"""Checkpoints whose parts contradict each other or have other names: one part is used, and a message says which."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.configs import default_max_new_tokens, generation_settings, sampling_defaults
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_name import model_name
from tests.checkpoint.test_errors import INDEX, SINGLE, edit_config, edit_tensors, refused
from tests.golden.model import golden

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return golden("llama3").write(tmp_path / "tied")


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return golden("llama2").write(tmp_path / "untied")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return golden("llama2").write(tmp_path / "sharded", shards=3)


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / SINGLE)


def rewrite(path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path / SINGLE)


def assert_same(a: Path, b: Path) -> None:
    one, two = (open_checkpoint(path, dtype="float32") for path in (a, b))
    for block in one.config.block_ids:
        expected, found = one.block(block), two.block(block)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)


# the head


def test_stored_head_differing_from_a_tied_embedding_is_used(tied: Path, caplog: pytest.LogCaptureFixture):
    head = tensors_of(tied)[EMBEDDING] + 1
    edit_tensors(tied, **{HEAD: head})
    checkpoint = open_checkpoint(tied, dtype="float32")
    assert not checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(checkpoint.block("head")["weight"], head)
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_stored_copy_of_a_tied_embedding_gives_no_warning(tied: Path, caplog: pytest.LogCaptureFixture):
    edit_tensors(tied, **{HEAD: tensors_of(tied)[EMBEDDING]})
    assert open_checkpoint(tied).config.tie_embeddings
    assert not caplog.records


def test_tied_embedding_stored_as_the_head_is_loaded(tied: Path, tmp_path: Path):
    other = Path(shutil.copytree(tied, tmp_path / "other"))
    tensors = tensors_of(tied)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    rewrite(other, tensors)
    assert_same(tied, other)


def test_missing_head_error_mentions_tied_embeddings(untied: Path):
    edit_tensors(untied, **{HEAD: None})
    refused(untied, HEAD, "missing", '"tie_word_embeddings": true')


# the vocabulary


def test_embedding_rows_beyond_the_vocabulary_are_cut(untied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    padded = Path(shutil.copytree(untied, tmp_path / "padded"))
    tensors = tensors_of(untied)
    rows = len(tensors[EMBEDDING])
    rewrite(padded, tensors | {n: np.pad(tensors[n], ((0, 5), (0, 0)), constant_values=9) for n in (EMBEDDING, HEAD)})
    assert_same(untied, padded)
    assert f"has {rows + 5} rows, vocab_size in config.json is {rows}" in caplog.text


def test_embedding_with_fewer_rows_than_the_vocabulary_is_refused(untied: Path):
    edit_tensors(untied, **{EMBEDDING: tensors_of(untied)[EMBEDDING][:-1]})
    refused(untied, EMBEDDING, "shape")


# tensors that are not used


def test_unknown_tensors_give_a_warning(untied: Path, caplog: pytest.LogCaptureFixture):
    biases = {f"model.layers.{n}.self_attn.q_proj.bias": np.ones(48, np.float32) for n in range(3)}
    zero = {f"model.layers.{n}.self_attn.k_proj.bias": np.zeros(48, np.float32) for n in range(3)}
    others = {
        "model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    edit_tensors(untied, **biases, **zero, **others)
    open_checkpoint(untied)
    (record,) = caplog.records
    message = record.getMessage()
    assert "4 tensors are not part of LlamaForCausalLM" in message
    assert message.endswith("model.layers.*.self_attn.q_proj.bias (3), model.layers.*.self_attn.q_norm.weight")


def test_tensors_of_layers_beyond_the_last_give_a_warning(untied: Path, caplog: pytest.LogCaptureFixture):
    layers = json.loads((untied / "config.json").read_text())["num_hidden_layers"]
    edit_config(untied, num_hidden_layers=layers - 1)
    open_checkpoint(untied)
    assert "9 tensors are not part" in caplog.text


# names


@pytest.mark.parametrize("prefix", ["", "base_model.model.model.", "language_model.model.", "transformer."])
def test_tensors_with_a_different_prefix_are_loaded(untied: Path, tmp_path: Path, prefix: str):
    other = Path(shutil.copytree(untied, tmp_path / "other"))
    outer = prefix.removesuffix("model.")
    tensors = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else outer * (prefix != outer) + name: value
        for name, value in tensors_of(untied).items()
    }
    rewrite(other, tensors)
    assert_same(untied, other)


@pytest.mark.parametrize(
    ("prefix", "other"),
    [("", "mtp."), ("language_model.model.", "vision_tower."), ("model.", "model.layers.0."), ("model.", "")],
)
def test_second_embedding_does_not_hide_the_prefix(untied: Path, tmp_path: Path, prefix: str, other: str):
    renamed = Path(shutil.copytree(untied, tmp_path / "renamed"))
    tensors = {prefix + name.removeprefix("model."): x for name, x in tensors_of(untied).items() if name != HEAD}
    head = {f"{prefix.removesuffix('model.')}{HEAD}": tensors_of(untied)[HEAD]}
    rewrite(renamed, tensors | head | {f"{other}embed_tokens.weight": np.ones((3, 4), np.float32)})
    assert_same(untied, renamed)


@pytest.mark.parametrize("architecture", ["LlamaModel", "LLaMAForCausalLM", None])
def test_architecture_is_recognised_by_its_other_names(tied: Path, tmp_path: Path, architecture: str | None):
    other = Path(shutil.copytree(tied, tmp_path / "other"))
    changes = {"architectures": None if architecture is None else [architecture], "model_type": "llama"}
    edit_config(other, hidden_act="swish", torch_dtype="torch.float32", **changes)
    if architecture == "LlamaModel":
        rewrite(other, {name.removeprefix("model."): value for name, value in tensors_of(tied).items()})
    assert_same(tied, other)


def test_model_without_a_head_is_loaded_for_embeddings(untied: Path, caplog: pytest.LogCaptureFixture):
    edit_config(untied, architectures=["LlamaModel"])
    tensors = tensors_of(untied)
    del tensors[HEAD]
    rewrite(untied, {name.removeprefix("model."): value for name, value in tensors.items()})
    assert open_checkpoint(untied).config.tie_embeddings
    assert "it can only serve embeddings" in caplog.text


def test_model_type_contradicting_the_architecture_gives_a_warning(untied: Path, caplog: pytest.LogCaptureFixture):
    edit_config(untied, model_type="qwen2")
    assert open_checkpoint(untied).config.architecture == "LlamaForCausalLM"
    assert "using architectures LlamaForCausalLM and ignoring model_type 'qwen2'" in caplog.text


def test_unknown_model_type_without_architectures_is_refused(untied: Path):
    edit_config(untied, architectures=None, model_type="mamba")
    refused(untied, "none (model_type 'mamba')")


# fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_scale", 0.0625),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("embedding_multiplier", 12),
        ("attention_multiplier", 0.5),
        ("use_qk_norm", True),
        ("no_rope_layers", [1, 0, 1]),
        ("clip_qkv", 8.0),
        ("rotary_pct", 0.25),
    ],
)
def test_unsupported_field_that_changes_the_computation_is_refused(untied: Path, field: str, value: object):
    edit_config(untied, **{field: value})
    refused(untied, "config.json", field, repr(value))


def test_unsupported_field_with_a_neutral_value_is_accepted(untied: Path):
    neutral = {"logit_scale": 1.0, "final_logit_softcapping": None, "use_qk_norm": False, "no_rope_layers": [1, 1, 1]}
    edit_config(untied, **neutral, attention_multiplier=8**-0.5, query_pre_attn_scalar=8, attention_dropout=0.1)
    open_checkpoint(untied)


def test_two_rotary_embeddings_give_a_warning(untied: Path, caplog: pytest.LogCaptureFixture):
    edit_config(
        untied,
        rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        rope_parameters={"rope_type": "default"},
        rope_theta=100.0,
    )
    rope = open_checkpoint(untied).config.rope
    assert (rope.kind, rope.theta) == ("linear", 500.0)
    assert "rope_scaling" in caplog.text
    assert "rope_theta 500.0" in caplog.text


def test_generation_config_with_a_different_end_of_sequence_gives_a_warning(
    untied: Path, caplog: pytest.LogCaptureFixture
):
    (untied / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_checkpoint(untied).config.eos_token_ids == (7, 2)
    assert not caplog.records, "one more is no contradiction"
    (untied / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert open_checkpoint(untied).config.eos_token_ids == (7,)
    assert "eos_token_id is [7] in generation_config.json, which is used, and [2] in config.json" in caplog.text
    (untied / "generation_config.json").write_text('{"eos_token_id": "7"}')
    refused(untied, "generation_config.json", "eos_token_id")


# files


def test_shards_without_an_index_are_loaded(sharded: Path, untied: Path, caplog: pytest.LogCaptureFixture):
    (sharded / INDEX).unlink()
    assert_same(untied, sharded)
    assert f"has no {INDEX}" in caplog.text
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "model-00002-of-00003.safetensors", "missing")


def test_single_file_with_any_name_is_loaded(untied: Path, tmp_path: Path):
    other = Path(shutil.copytree(untied, tmp_path / "other"))
    (other / SINGLE).rename(other / "merged.safetensors")
    assert_same(untied, other)


def test_tensor_in_two_shards_follows_the_index_and_is_refused_without_one(
    sharded: Path, untied: Path, caplog: pytest.LogCaptureFixture
):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(name for name in index.values() if name != index[HEAD])
    save_file(load_file(sharded / other) | {HEAD: np.zeros((96, 48), np.float32)}, sharded / other)
    assert_same(untied, sharded)
    assert f"{HEAD} is also in {other}; it is read from {index[HEAD]}" in caplog.text
    (sharded / INDEX).unlink()
    refused(sharded, HEAD, "is in", "too")


def test_single_file_next_to_an_index_gives_a_warning(sharded: Path, untied: Path, caplog: pytest.LogCaptureFixture):
    save_file({HEAD: np.zeros(3, np.float32)}, sharded / SINGLE)
    assert_same(untied, sharded)
    assert f"{SINGLE} is not read: {INDEX} lists other files" in caplog.text


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-Q4_K_M.gguf", ["GGUF"]),
        ("consolidated.safetensors", ["consolidated.safetensors", "Hugging Face's format"]),
        ("pytorch_model-00001-of-00002.bin", ["pickle", "safetensors"]),
        ("adapter_model.safetensors", ["LoRA", "merge_and_unload"]),
    ],
)
def test_error_without_weights_names_the_files_found(untied: Path, file: str, words: list[str]):
    (untied / SINGLE).rename(untied / file)
    refused(untied, file, *words)


def test_error_for_a_path_that_is_not_a_model_names_the_reason(untied: Path, tmp_path: Path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    refused(gguf, "model.gguf", "GGUF is not supported")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    refused(adapter, "LoRA adapter", "merge")
    cache = tmp_path / "models--org--name"
    shutil.copytree(untied, cache / "snapshots" / "0123abc")
    refused(cache, "cache", "snapshots/0123abc")
    assert model_name(cache / "snapshots" / "0123abc") == "org/name"
    assert model_name(untied) == "untied"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX"),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4, "group_size": 64}}, "MLX"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down_proj": {"bits": 8}}}},
            "dynamic gives {'bits': 8}",
        ),
    ],
)
def test_error_for_an_unsupported_quantisation_names_it(untied: Path, changes: dict, word: str):
    edit_config(untied, **changes)
    refused(untied, "config.json", word)


# generation_config.json


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 50.0}, {"repetition_penalty": 0}, {"min_p": 2}]
)
def test_invalid_default_in_generation_config_is_ignored(wrong: dict, caplog: pytest.LogCaptureFixture):
    assert sampling_defaults({**wrong, "temperature": wrong.get("temperature", 0.6)}, Path("model")) in (
        {"temperature": 0.6},
        {},
    )
    ((name, value),) = wrong.items()
    assert f"generation_config.json: {name} is {value!r}" in caplog.text


def test_do_sample_false_in_generation_config_means_greedy():
    given = {"do_sample": False, "temperature": 0.9, "repetition_penalty": 1.1}
    assert sampling_defaults(given, Path()) == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert sampling_defaults({"do_sample": True, "top_k": 20}, Path()) == {"top_k": 20}


def test_max_new_tokens_in_generation_config_is_a_default(caplog: pytest.LogCaptureFixture):
    assert default_max_new_tokens({"max_new_tokens": 512}, Path()) == 512
    assert default_max_new_tokens({}, Path()) is None
    assert default_max_new_tokens({"max_new_tokens": -1}, Path()) is None
    assert "max_new_tokens is -1" in caplog.text


def test_source_of_sampling_defaults_is_the_model_none_or_a_folder(tmp_path: Path):
    own = {"temperature": 0.6}
    assert generation_settings("auto", own, Path("model")) == (own, Path("model"))
    assert generation_settings(Path("vllm"), own, Path("model")) == ({}, Path("model"))
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    assert generation_settings(tmp_path, own, Path("model")) == ({"top_k": 5}, tmp_path)
    with pytest.raises(ConfigError, match=r"must be auto, vllm or a folder .* \(--generation-config\)"):
        generation_settings("absent", own, Path("model"))
