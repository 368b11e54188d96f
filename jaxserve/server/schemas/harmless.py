"""Fields that no answer depends on, which are accepted and ignored.

Clients of other servers send them. They are listed by the reason why the answer is the same without them. The page
docs/server.md shows the same lists.
"""

from collections.abc import Mapping

HARMLESS_BY_REASON: Mapping[str, tuple[str, ...]] = {
    "accounts, logs and prices": (
        "user", "user_id", "metadata", "client_metadata", "store", "service_tier", "safety_identifier",
        "user_security_context", "usage", "tags", "trace", "custom_labels", "timings_per_token",
        "return_progress", "perf_metrics_in_response",
        "input_cost_per_token", "output_cost_per_token", "debug",
    ),
    "ids of requests and sessions": (
        "request_id", "rid", "session_id", "conversation_id", "chat_id", "message_id", "parent_id", "run_id",
        "run_name", "thread_id", "trace_id", "id",
    ),
    "caching and speculation, which only save time": (
        "prompt_cache_key", "prompt_cache_retention", "cache_prompt", "cache_control", "use_cache", "caching", "cache",
        "n_cache_reuse", "prediction", "speculative_ngram", "speculative.n_max", "speculative.n_min",
        "speculative.p_min", "ngram_corpus_id", "prompt_lookup_num_tokens",
    ),
    "where a request runs, and how often a stream sends": (
        "provider", "models", "route", "guided_decoding_backend", "routed_dp_rank", "data_parallel_rank", "id_slot",
        "slot_id", "stream_interval", "sse_ping_interval", "max_tokens_second", "max_updates_second",
    ),
    "how a model is loaded": (
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread",
        "numa", "keep_alive",
    ),
    "prompts that are too long, which are refused": (
        "transforms", "truncation_length", "n_keep", "num_keep", "n_discard",
    ),
    "settings of the client": (
        "api_key", "api_base", "base_url", "api_type", "api_server", "api_version", "custom_llm_provider",
        "extra_headers", "extra_query", "timeout", "request_timeout", "stream_timeout", "max_retries", "num_retries",
        "drop_params", "allowed_openai_params", "litellm_call_id", "litellm_metadata", "litellm_session_id",
        "litellm_trace_id", "ls_structured_output_format", "legacy_api", "betas", "anthropic_version", "variables",
        "background_tasks", "model_item", "filter_ids",
    ),
    "details of samplers that are off, and of images, experts and tools that are not used": (
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dynatemp_low", "dynatemp_high", "smoothing_curve",
        "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold",
        "adaptive_decay", "early_stopping", "rep_pen_slope", "pad_token_id", "spaces_between_special_tokens",
        "parallel_tool_calls", "routed_experts_prompt_start", "routed_experts_start_len", "media_io_kwargs",
        "mm_processor_kwargs", "return_mm_kwargs", "image_config", "images_config", "max_dynamic_patch",
        "min_dynamic_patch", "use_audio_in_video",
    ),
}  # fmt: skip

HARMLESS = frozenset(name for names in HARMLESS_BY_REASON.values() for name in names)

HARMLESS_IN_MESSAGES_API = HARMLESS | {
    "context_management", "diagnostics", "inference_geo", "speed", "fallbacks", "fallback_credit_token",
    "billing_policy", "user_profile_id", "workspace_id", "anthropic_beta",
}  # fmt: skip

HARMLESS_IN_MESSAGES = frozenset(
    {
        "id", "message_id", "parent_id", "type", "index", "status", "model", "metadata", "timestamp", "created",
        "created_at", "createdAt", "cache_control", "annotations", "citations", "usage", "logprobs", "finish_reason",
        "stop_reason", "weight", "example", "reasoning_details", "thinking_blocks", "provider_specific_fields",
        "provider_metadata", "additional_kwargs", "response_metadata", "usage_metadata",
        "parsed", "object", "token_ids", "stop_sequence", "stop_details", "container", "context_management",
        "service_tier", "system_fingerprint",
    }
)  # fmt: skip

HARMLESS_IN_PARTS = frozenset(
    {"id", "index", "cache_control", "annotations", "citations", "logprobs", "providerOptions", "providerMetadata"}
)

HARMLESS_IN_STREAM_OPTIONS = frozenset({"include_obfuscation"})

HARMLESS_IN_OUTPUT_CONFIG = frozenset({"task_budget"})  # which models must be trained for
