"""The methods and attributes of vLLM's classes that do not exist here, with what to use instead."""

from collections.abc import Mapping

from jaxserve.core.vllm_names import NO_LORA, TEXT_ONLY

_WEIGHTS = (
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
    *("start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version"),
    *("get_weight_version", "compute_weight_checksums"),
)

METHODS: Mapping[str, str] = {
    "encode": "use embed",
    "score": "use embed: the product of two embeddings is their similarity",
    "classify": "models with a classifier are not supported",
    "reward": "models with a classifier are not supported",
    "beam_search": "there is no beam search: use generate with n",
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "use generate, chat or AsyncLLM"),
    "sleep": "use close",
    "release_kv_cache_memory": "use close",
    "shutdown": "use close",
    "wake_up": "use a new LLM",
    "llm_engine": "use generate, chat, stream or embed",
    "get_metrics": "use AsyncLLM, whose engine has metrics",
    "collective_rpc": "the engine runs in one process",
    "apply_model": "the engine runs in one process",
    "get_world_size": "it is tp times pp times dp",
    "set_tokenizer": "give the tokenizer's folder as the option tokenizer",
    "reset_prefix_cache": "requests with different salts of AsyncLLM share no pages",
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), TEXT_ONLY),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), NO_LORA),
    **dict.fromkeys(_WEIGHTS, "open a new LLM for other weights"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use jax.profiler"),
    "model_config": "use max_model_len",
    "from_engine_args": "give the options to LLM",
}

ASYNC_METHODS: Mapping[str, str] = {
    **METHODS,
    **dict.fromkeys(("generate", "add_request", "enqueue"), "use stream"),
    "chat": "use stream_chat",
    **dict.fromkeys(("abort", "abort_request"), "close the iterator that stream returned"),
    **dict.fromkeys(("from_engine_args", "from_vllm_config"), "give the options to AsyncLLM"),
    **dict.fromkeys(("get_metrics", "do_log_stats"), "use engine.metrics_text()"),
    **dict.fromkeys(("check_health", "is_running", "is_stopped", "errored", "dead_error"), "use engine.check_health()"),
    **dict.fromkeys(("wait_for_requests_to_drain", "pause_generation", "resume_generation"), "use engine.drain(...)"),
    **dict.fromkeys(("is_paused", "is_sleeping", "get_status"), "use engine.snapshots()"),
    **dict.fromkeys(("get_num_unfinished_requests", "get_num_queued_tokens"), "use engine.snapshots()"),
    **dict.fromkeys(("scale_elastic_ep", "handle_fault"), "use the option policy"),
    **dict.fromkeys(("get_tokenizer", "tokenizer"), "use engine.tokenizer"),
    **dict.fromkeys(("get_model_config", "get_vllm_config", "max_model_len"), "use engine.info"),
    "is_tracing_enabled": "use the option otlp_endpoint",
    "get_supported_tasks": "use stream, stream_chat or embed",
}

SAMPLING_PARAMS: Mapping[str, str] = {
    "clone": "they never change, so no copy is needed; use dataclasses.replace for other values",
    **dict.fromkeys(("update_from_generation_config", "update_from_tokenizer"), "use dataclasses.replace"),
    **dict.fromkeys(("structured_outputs", "guided_decoding"), "use structured"),
    "sampling_type": "use greedy",
    "eos_token_id": "use eos_token_id of the tokenizer",
    "all_stop_token_ids": "use stop_token_ids",
    "bad_words_token_ids": "use bad_words",
    "num_logprobs": "use logprobs",
    "thinking_token_budget": "use reasoning",
    "output_kind": "generate returns whole answers, and stream their new parts",
    "extra_args": "it is for plugins of vLLM",
}

REQUEST_OUTPUT: Mapping[str, str] = {
    **dict.fromkeys(("text", "token_ids", "finish_reason", "logprobs"), "use that of one of its outputs"),
    **dict.fromkeys(("encoder_prompt", "encoder_prompt_token_ids"), "models have a decoder alone"),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), "KV pages stay in the engine"),
    "lora_request": NO_LORA,
    "num_cache_creation_tokens": "use num_cached_tokens",
    "prompt_token_id_logprobs": "use prompt_logprobs",
    "add": "outputs of a stream hold its new parts: join their texts",
}

COMPLETION_OUTPUT: Mapping[str, str] = {
    "finished": "an answer has ended if its finish_reason is not None",
    "lora_request": NO_LORA,
    **dict.fromkeys(("embedding", "data"), "embed returns arrays"),
    **dict.fromkeys(("routed_experts", "sampling_mask", "weight_versions"), "it is not returned"),
    "spec_decode_metrics": "there is no speculative decoding",
}

REQUEST_METRICS: Mapping[str, str] = {
    **dict.fromkeys(("arrival_time", "queued_ts"), "use arrival"),
    **dict.fromkeys(("first_scheduled_time", "scheduled_ts"), "use first_scheduled"),
    **dict.fromkeys(("first_token_time", "first_token_ts"), "use first_token"),
    **dict.fromkeys(("last_token_time", "last_token_ts"), "use last_token"),
    "finished_time": "use finished",
    "time_in_queue": "use first_scheduled - arrival",
    "first_token_latency": "use first_token - arrival",
    "num_generation_tokens": "use the length of token_ids",
}
