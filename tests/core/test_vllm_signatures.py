"""The keyword arguments and attributes of vLLM 0.33's library: each works, is neutral, or says what to use instead."""

import copy
import inspect
import pickle
from dataclasses import fields

import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, CompletionOutput, EngineConfig, RequestOutput, SamplingParams, StructuredOutput
from jaxserve.core import vllm_names
from jaxserve.core.errors import ConfigError, UnknownKeyword
from jaxserve.core.keywords import OtherName, is_one_of, translate
from jaxserve.core.options import check_ranges
from jaxserve.core.request import RequestMetrics
from jaxserve.core.vllm_options import ENGINE

OPTIONS = """
model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path
allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision chat_template seed
gpu_memory_utilization cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_params
enforce_eager enable_return_routed_experts return_sampling_mask disable_custom_all_reduce hf_token hf_overrides
mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config kv_cache_memory_bytes
compilation_config quantization_config logits_processors spec_method spec_model spec_tokens served_model_name
load_format download_dir config_format hf_config_path max_model_len kv_cache_dtype block_size enable_prefix_caching
pipeline_parallel_size data_parallel_size data_parallel_rank distributed_executor_backend enable_expert_parallel
enable_eplb max_num_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens
long_prefill_token_threshold max_num_partial_prefills max_logprobs logprobs_mode disable_log_stats
enable_log_requests code_revision swap_space limit_mm_per_prompt enable_lora max_loras max_lora_rank lora_dtype
max_cpu_loras num_gpu_blocks_override model_loader_extra_config ignore_patterns enable_chunked_prefill
scheduling_policy speculative_config reasoning_parser otlp_traces_endpoint collect_detailed_traces generation_config
override_generation_config enable_sleep_mode model_impl attention_backend async_scheduling stream_interval
kv_transfer_config kv_events_config kv_offloading_size cudagraph_capture_sizes optimization_level performance_mode
use_tqdm_on_load max_parallel_loading_workers disable_cascade_attn enable_prompt_embeds nnodes node_rank
prefill_context_parallel_size decode_context_parallel_size moe_backend all2all_backend log_level shutdown_timeout
"""

SAMPLING = """
n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length structured_outputs
logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
repetition_detection routed_experts_prompt_start trace_decode_token_ids best_of use_beam_search length_penalty
early_stopping guided_decoding logits_processors truncate_prompt_tokens
"""

STRUCTURED = """
json regex choice grammar json_object disable_any_whitespace disable_additional_properties whitespace_pattern
structural_tag disable_fallback backend
"""

CALL = "sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs"
CHAT = f"""
messages {CALL} chat_template chat_template_content_format add_generation_prompt continue_final_message tools
chat_template_kwargs
"""
STREAM = """
prompt sampling_params request_id prompt_text lora_request tokenization_kwargs trace_headers priority
data_parallel_rank session_id kv_hints reasoning_ended reasoning_parser_kwargs
"""

SIGNATURES = {
    EngineConfig: (OPTIONS, ENGINE),
    SamplingParams: (SAMPLING, vllm_names.SAMPLING),
    StructuredOutput: (STRUCTURED, vllm_names.STRUCTURED),
    LLM.generate: (f"prompts prompt_token_ids {CALL}", vllm_names.GENERATE),
    LLM.chat: (CHAT, vllm_names.CHAT),
    LLM.embed: ("prompts use_tqdm pooling_params lora_request tokenization_kwargs pooling_task", vllm_names.EMBED),
    AsyncLLM.stream: (STREAM, vllm_names.ASYNC_STREAM),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_every_keyword_works_or_is_explained(function) -> None:
    text, table = SIGNATURES[function]
    names = text.split()
    own = inspect.signature(function).parameters.keys()
    assert [name for name in names if name not in own and name not in table] == []
    for name in set(names) - own:
        assert translate("it", {name: None}, own, table) == {}, "None is as if it were not given"


# The values with which these options and parameters are given although they are the defaults of vLLM.
@pytest.mark.parametrize(
    "given",
    [
        {"quantization": None, "cpu_offload_gb": 0, "runner": "auto", "convert": "auto", "offload_group_size": 0},
        {"seed": None, "load_format": None, "variants": None, "warmup": None, "max_model_len": None},
        {"block_size": None, "enable_prefix_caching": None, "async_scheduling": None, "hf_overrides": {}},
        {"enable_chunked_prefill": True, "scheduling_policy": "fcfs", "generation_config": "auto", "nnodes": 1},
        {"logits_processors": [], "override_generation_config": {}, "enable_lora": False, "spec_method": None},
        {"enforce_eager": True, "trust_remote_code": True, "swap_space": 4, "limit_mm_per_prompt": {"image": 0}},
        {"offload_params": set(), "enable_expert_parallel": False, "logprobs_mode": "raw_logprobs"},
    ],
)
def test_options_that_ask_for_nothing_change_nothing(given) -> None:
    config = EngineConfig(**given)
    check_ranges(config)
    assert config == EngineConfig()


@pytest.mark.parametrize(
    ("table", "given"),
    [
        (vllm_names.GENERATE, {"priority": [0, 0], "lora_request": [None, None], "tokenization_kwargs": {}}),
        (vllm_names.GENERATE, {"priority": np.zeros(2, int), "lora_request": None}),
        (vllm_names.CHAT, {"priority": [0], "mm_processor_kwargs": {}, "chat_template_content_format": "auto"}),
        (vllm_names.SAMPLING, {"extra_args": {}, "logits_processors": [], "flat_logprobs": np.bool_(False)}),
        (vllm_names.SAMPLING, {"skip_clone": True, "routed_experts_prompt_start": 0, "thinking_token_budget": -1}),
    ],
)
def test_arguments_that_ask_for_nothing_are_accepted(table, given) -> None:
    assert translate("it", given, (), table) == {}


def test_priorities_that_ask_for_something_are_explained() -> None:
    for priority in (1, [0, 1], [False], np.ones(2, int)):
        with pytest.raises(UnknownKeyword, match="use AsyncLLM, whose streams have a priority"):
            LLM.generate(None, ["a", "b"], priority=priority)


def test_true_is_not_one() -> None:
    assert not is_one_of(True, (1,))
    assert not is_one_of(0, (False,))
    assert is_one_of(1.0, (1,))
    assert OtherName(reason="no", each=True).accepts([])


class TorchType:
    """A type like those of PyTorch, which is known by its text alone."""

    def __str__(self) -> str:
        return "torch.float16"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto"), ("bf16", "bfloat16")),
        *((np.float32, "float32"), (np.dtype("float16"), "float16"), (TorchType(), "float16"), (None, "auto")),
    ],
)
def test_types_have_other_names_too(given, name) -> None:
    assert EngineConfig(dtype=given).dtype == EngineConfig(torch_dtype=given).dtype == name


def test_type_that_is_no_choice_is_shown_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="dtype is 'int9': it must be one of auto, bfloat16, float16, float32"):
        check_ranges(EngineConfig(dtype="int9"))


PARAMS = SamplingParams(n=2)
ANSWER = CompletionOutput(0, "a", (1,))
OUTPUT = RequestOutput("0", "p", (1,), (ANSWER,), True, metrics=RequestMetrics(0.0))


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (PARAMS, "clone update_from_generation_config sampling_type all_stop_token_ids num_logprobs guided_decoding"),
        (OUTPUT, "lora_request encoder_prompt encoder_prompt_token_ids kv_transfer_params num_cache_creation_tokens"),
        (OUTPUT, "text token_ids finish_reason add"),
        (ANSWER, "finished lora_request routed_experts sampling_mask spec_decode_metrics weight_versions embedding"),
        (OUTPUT.metrics, "arrival_time first_scheduled_time first_token_time last_token_time finished_time"),
        (OUTPUT.metrics, "time_in_queue queued_ts scheduled_ts"),
        (LLM.__new__(LLM), "encode score classify reward beam_search enqueue wait_for_completion get_world_size"),
        (LLM.__new__(LLM), "apply_model collective_rpc start_profile stop_profile reset_prefix_cache reset_mm_cache"),
        (LLM.__new__(LLM), "sleep wake_up get_metrics llm_engine update_weights"),
        (AsyncLLM.__new__(AsyncLLM), "generate encode abort shutdown get_tokenizer tokenizer is_running errored"),
        (AsyncLLM.__new__(AsyncLLM), "check_health add_request pause_generation is_sleeping add_lora do_log_stats"),
    ],
)
def test_attribute_that_does_not_exist_says_what_to_use(owner, names) -> None:
    for name in names.split():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': ") as refused:
            getattr(owner, name)
        assert len(str(refused.value).partition(": ")[2]) > 5


def test_values_with_advice_are_copied_and_pickled_as_others() -> None:
    for value in (PARAMS, ANSWER, OUTPUT):
        assert copy.deepcopy(value) == copy.copy(value) == pickle.loads(pickle.dumps(value)) == value
        assert not hasattr(value, "nothing_like_it")


def test_tables_name_only_what_exists() -> None:
    options = {field.name for field in fields(EngineConfig)}
    assert {other.same for other in ENGINE.values() if other.same} <= options


def test_names_of_others_are_suggested_only_if_they_are_very_similar() -> None:
    for given, hint in (("nope", ""), ("enforce_eagr", "'enforce_eager'"), ("max_num_seq", "'max_num_seqs'")):
        with pytest.raises(UnknownKeyword) as refused:
            EngineConfig(**{given: 1})
        assert hint in str(refused.value)
        assert ("did you mean" in str(refused.value)) == bool(hint)
