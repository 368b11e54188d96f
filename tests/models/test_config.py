"""Configurations from old and new config.json files."""

import re

import pytest

from jaxserve.core.config import RopeConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.models import config_from_hf
from tests.golden.cases import SMALL, case, llama, qwen3_moe


def qwen2(**fields):
    return case("Qwen2ForCausalLM", "qwen2", **fields)


def mistral(**fields):
    return case("MistralForCausalLM", "mistral", **fields)


def test_llama_configuration_sets_every_field():
    config = config_from_hf(llama(torch_dtype="float16"))
    assert (config.architecture, config.dtype) == ("LlamaForCausalLM", "float16")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (2,)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert not config.tie_embeddings


def test_absent_kv_heads_mean_as_many_as_query_heads():
    hf = {key: value for key, value in llama().items() if key != "num_key_value_heads"}
    assert config_from_hf(hf).num_kv_heads == 6


def test_llama_bias_options_set_the_biases():
    config = config_from_hf(llama(attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)


def test_qwen2_has_biases_on_queries_keys_and_values_only():
    config = config_from_hf(qwen2())
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)


def test_qwen3_has_norms_and_a_head_dim_of_its_own():
    config = config_from_hf(case("Qwen3ForCausalLM", "qwen3"))
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, True, 128)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (5, (5,)), ([5, 6], (5, 6)), (0, (0,))])
def test_end_of_sequence_ids_may_be_one_or_several(value, ids: tuple[int, ...]):
    assert config_from_hf(llama(eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": "float32"}, "float32"), ({"dtype": "float16"}, "float16")],
)
def test_dtype_comes_from_either_name_and_defaults(fields: dict, dtype: str):
    assert config_from_hf(llama(**fields)).dtype == dtype


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig("linear", 5e5, 2.0, original_max_position=256),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 2, "beta_fast": 16}},
            RopeConfig("yarn", 5e5, 2.0, original_max_position=256, beta_fast=16.0),
        ),
    ],
)
def test_rope_settings_are_read_in_every_style(fields: dict, rope: RopeConfig):
    assert config_from_hf(llama(**fields)).rope == rope


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
        ({"type": "linear", "factor": 1e30}, 2**31 - 1),
        ({"type": "yarn", "factor": 1e30}, 2**31 - 1),
    ],
)
def test_scaled_rope_stretches_the_context(scaling: dict | None, length: int):
    assert config_from_hf(llama(rope_scaling=scaling)).max_position == length


@pytest.mark.parametrize(
    ("hf", "windows"),
    [
        (llama(sliding_window=8), ()),
        (mistral(sliding_window=8), (8, 8, 8)),
        (mistral(sliding_window=None), ()),
        (mistral(), (4096, 4096, 4096)),
        (qwen2(sliding_window=8, use_sliding_window=False), ()),
        (qwen2(sliding_window=8, use_sliding_window=True, max_window_layers=2), (None, None, 8)),
        (qwen2(sliding_window=8, use_sliding_window=True), (None, None, None)),
        (
            qwen2(
                sliding_window=8,
                use_sliding_window=True,
                max_window_layers=0,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            (8, None, 8),
        ),
        (qwen3_moe(sliding_window=8, use_sliding_window=True, max_window_layers=2), (8, 8, 8)),
    ],
)
def test_sliding_window_settings_give_each_layers_window(hf: dict, windows: tuple[int | None, ...]):
    assert config_from_hf(hf).windows == windows


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, (True, True, True)),
        ({"mlp_only_layers": [0]}, (False, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False)),
    ],
)
def test_sparse_layers_follow_the_configuration(fields: dict, sparse: tuple[bool, ...]):
    config = config_from_hf(qwen3_moe(**fields))
    assert tuple(config.is_sparse(layer) for layer in range(3)) == sparse


def test_experts_under_their_newer_name_are_read():
    hf = qwen3_moe(num_experts=None, num_local_experts=16)
    moe = config_from_hf(hf).moe
    assert moe is not None
    assert moe.num_experts == 16


@pytest.mark.parametrize(
    ("hf", "word"),
    [
        (SMALL, "none (model_type None)"),
        (SMALL | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        (qwen2(use_sliding_window=True, layer_types=["sliding_attention"]), "layer_types"),
        (qwen2(use_sliding_window=True, layer_types=["chunked_attention"] * 3), "chunked_attention"),
        (qwen3_moe(num_experts=2), "num_experts_per_tok is 3"),
        (qwen3_moe(moe_intermediate_size=None), "moe_intermediate_size"),
        (llama(vocab_size=True), "vocab_size"),
        (llama(num_hidden_layers=0), "num_hidden_layers"),
        (llama(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        (llama(architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window is 0"),
        (qwen2(use_sliding_window=True, sliding_window="24"), "sliding_window is '24'"),
        (llama(eos_token_id="x"), "eos_token_id is 'x'"),
        (llama(rms_norm_eps=-1e-5), "rms_norm_eps is -1e-05"),
        (llama(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (llama(rope_theta=float("inf")), "rope_theta is inf"),
        (llama(rope_theta=True), "rope_theta is True"),
        (llama(rope_parameters={"rope_theta": -5e5}), "rope_theta is -500000.0"),
        (llama(tie_word_embeddings="false"), "tie_word_embeddings is 'false': it must be true or false"),
        (llama(attention_bias="no"), "attention_bias is 'no'"),
        (llama(mlp_bias=[]), "mlp_bias is []"),
        (llama(rms_norm_eps=1e300), "rms_norm_eps is 1e+300"),
        (llama(rope_theta=1e-300), "rope_theta is 1e-300"),
        (llama(head_dim=7), "head_dim is 7: it must be even"),
        (llama(hidden_size=4), "head_dim is 0"),
        (llama(max_position_embeddings=2**31), "max_position_embeddings is 2147483648"),
        (mistral(sliding_window=10**12), "sliding_window is 1000000000000"),
        (llama(eos_token_id=2**31), "eos_token_id is 2147483648"),
        (llama(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 4.0}), "rope_theta is 1.0"),
        (qwen2(use_sliding_window="false"), "use_sliding_window is 'false'"),
        (qwen3_moe(norm_topk_prob="yes"), "norm_topk_prob is 'yes'"),
        (qwen3_moe(mlp_only_layers=["0"]), "mlp_only_layers is ['0']"),
        (llama(rope_scaling={"factor": 4.0}), "rope_scaling has a factor, 4.0, but no rope_type"),
        (llama(rope_scaling=["linear", 4.0]), "rope_scaling is ['linear', 4.0]: it must be an object"),
        *(
            (llama(rope_scaling={"rope_type": kind, "factor": 4.0} | wrong), word)
            for kind, wrong, word in [
                ("linear", {"factor": 0}, "factor is 0"),
                ("linear", {"factor": -2.0}, "factor is -2.0"),
                ("yarn", {"factor": float("nan")}, "factor is nan"),
                ("yarn", {"beta_fast": 0}, "beta_fast is 0"),
                ("yarn", {"attention_factor": -1.0}, "attention_factor is -1.0"),
                ("yarn", {"truncate": "no"}, "truncate is 'no'"),
                ("yarn", {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
                ("llama3", {"original_max_position_embeddings": 32.5}, "original_max_position_embeddings is 32.5"),
                ("llama3", {"low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor is 4.0"),
            ]
        ),
    ],
)
def test_error_for_an_unsupported_configuration_names_the_value(hf: dict, word: str):
    with pytest.raises(CheckpointError, match=re.escape(word)):
        config_from_hf(hf)
