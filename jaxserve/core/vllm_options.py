"""The options of vLLM's engines and of its server that have another name here, or none, and some of other engines.

`ENGINE` has the options of engines, which are keyword arguments too; `COMMAND_LINE` has the server's besides, and
`TERMINAL` those of requests. In the reasons, names of options are between backticks, so that each interface can show
them in its own spelling.
"""

from collections.abc import Mapping

from jaxserve.core.keywords import OtherName, ignored, same, sets, use
from jaxserve.core.vllm_names import NO_LORA, TEXT_ONLY

OWN_FORMAT = "leave it out for a checkpoint that is already quantised, and use `precision` to quantise another at load"
ONE_ENGINE = "the engine chooses this itself"
ONE_PROCESS = "an engine runs in one process, on its devices (see `tp`, `pp` and `dp`)"
COMPILED = "all programs are compiled (see `warmup`)"
ON_DEVICE = "weights stay on the device: use `precision` for smaller ones"
POOLED = "embeddings are normalised last hidden states"
NO_SPECULATION = "there is no speculative decoding"
NOT_RETURNED = "it is not returned"
TASKS = ("auto", "generate", "none", "embed", "embedding", "pooling")  # what any model does here

_RENAMED = same(
    tensor_parallel_size="tp",
    pipeline_parallel_size="pp",
    data_parallel_size="dp",
    block_size="page_size",
    enable_prefix_caching="prefix_caching",
    num_gpu_blocks_override="kv_pages",
    max_num_queued_reqs="max_queued_requests",
    max_num_queued_tokens="max_queued_tokens",
    async_scheduling="overlap",
    otlp_traces_endpoint="otlp_endpoint",
    torch_dtype="dtype",
)

_MODEL = {
    **use(OWN_FORMAT, "quantization", "quantization_config", "quantization_param_path", "load_in_8bit", "load_in_4bit"),
    **use(OWN_FORMAT, "allow_deprecated_quantization"),
    **use("use `max_model_len`", "max_length", "max_seq_len", "context_length", "n_ctx"),
    **use("write it after the tokenizer's name, as in `ORG/NAME@REVISION`", "tokenizer_revision"),
    **use("config.json is read from the model's folder", "hf_config_path"),
    **use("give the folder as `model`", "model_weights"),
    **use("change config.json in the model's folder", "hf_overrides", "rope_scaling", "rope_theta"),
    **use("change config.json in the model's folder", "model_class_overrides", "disable_sliding_window"),
    **use(NO_LORA, "enable_lora", "lora_modules", "default_mm_loras", "lora_target_modules"),
    **ignored(NO_LORA, "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "fully_sharded_loras"),
    **use("use generate, chat or embed of any model", "task", "runner", "convert", neutral=TASKS),
    **use(POOLED, "pooler_config", "override_pooler_config"),
    **use("give prompts as text or token ids", "enable_prompt_embeds"),
    **use("use logit_bias, bad_words or structured of SamplingParams", "logits_processors"),
    **use("use jaxserve.parsing", "reasoning_parser", "reasoning_parser_plugin", "tool_parser"),
    **use("there is no watermarking", "watermark_config"),
    **use("there are no plugins for inputs and outputs", "io_processor_plugin"),
    **use("log-probabilities are those of the raw logits", "logprobs_mode", neutral=("raw_logprobs",)),
    **use(NOT_RETURNED, "enable_return_routed_experts", "return_sampling_mask", "enable_trace_replay"),
    **ignored("no code of a model's folder is ever run", "trust_remote_code", "code_revision"),
    **ignored("weights are read from safetensors", "model_loader_extra_config", "ignore_patterns", "use_tqdm_on_load"),
    **ignored("weights are read from safetensors", "safetensors_load_strategy", "max_parallel_loading_workers"),
    **ignored("weights are read from safetensors", "pt_load_map_location", "model_impl"),
    **ignored(TEXT_ONLY, "limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path", "media_io_kwargs"),
    **ignored(
        TEXT_ONLY, "allowed_media_domains", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_encoder_only"
    ),
    **ignored(
        TEXT_ONLY, "disable_mm_preprocessor_cache", "mm_encoder_tp_mode", "enable_mm_embeds", "skip_mm_profiling"
    ),
    **ignored(TEXT_ONLY, "language_model_only", "interleave_mm_strings", "disable_chunked_mm_input"),
}

_MEMORY = {
    **use("use `memory_gb`, the budget of everything in GB, or `kv_pages`", "kv_cache_memory_bytes", "memory"),
    **use("use `kv_cache_dtype`", "kv_cache_precision", "kv_cache_dtype_skip_layers"),
    **use("KV pages stay on the device", "kv_offloading_size", "kv_transfer_config", "kv_events_config", neutral=(0,)),
    **use(ON_DEVICE, "cpu_offload_gb", "offload_group_size", neutral=(0,)),
    **use(ON_DEVICE, "offload_params", "cpu_offload_params", neutral=([], set())),
    **ignored(ON_DEVICE, "offload_backend", "offload_num_in_group", "offload_prefetch_step", "kv_offloading_backend"),
    **ignored("preempted sequences are computed again", "swap_space", "preemption_mode"),
    **ignored("use close, and a new LLM", "enable_sleep_mode", "sleep_mode_backend", "enable_cumem_allocator"),
    **ignored(ONE_ENGINE, "calculate_kv_scales", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager"),
    **ignored("models have attention alone", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size"),
}

_SCHEDULING = {
    **use(NO_SPECULATION, "speculative_config", "speculative_model", "num_speculative_tokens"),
    **use(NO_SPECULATION, "spec_method", "spec_model", "spec_tokens"),
    **ignored("prompts are always computed in chunks", "enable_chunked_prefill", neutral=(True,)),
    **use("requests with a smaller priority are served first", "scheduling_policy", neutral=("fcfs", "priority")),
    **use("use `max_num_seqs`", "max_num_active_seqs"),
    **use("use `max_num_batched_tokens`", "max_num_scheduled_tokens"),
    **ignored("chunks are as long as `max_num_batched_tokens` lets them be", "long_prefill_token_threshold"),
    **ignored("chunks are as long as `max_num_batched_tokens` lets them be", "max_num_partial_prefills"),
    **ignored("chunks are as long as `max_num_batched_tokens` lets them be", "max_long_partial_prefills"),
    **ignored("each token is sent at once", "stream_interval", "num_scheduler_steps", "multi_step_stream_outputs"),
    **use("use `policy`", "scheduler_cls"),
}

_DEVICES = {
    **use(ONE_PROCESS, "nnodes", "prefill_context_parallel_size", "decode_context_parallel_size", neutral=(1,)),
    **use(ONE_PROCESS, "node_rank", "data_parallel_rank", "data_parallel_start_rank", neutral=(0,)),
    **use(ONE_PROCESS, "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "device_ids"),
    **use(ONE_PROCESS, "data_parallel_hybrid_lb", "data_parallel_external_lb", "worker_cls", "worker_extension_cls"),
    **use("experts are split over devices like all weights: use `tp`", "enable_expert_parallel", "enable_eplb"),
    **use("use `policy` and `max_tp`, with which instances merge and split", "enable_elastic_ep"),
    **ignored(ONE_PROCESS, "master_addr", "master_port", "data_parallel_backend", "distributed_timeout_seconds"),
    **ignored(ONE_ENGINE, "distributed_executor_backend", "worker_use_ray", "disable_custom_all_reduce", "device"),
    **ignored(ONE_ENGINE, "eplb_config", "all2all_backend", "enable_dbo", "ubatch_size", "numa_bind"),
}

_KERNELS = {
    **ignored(COMPILED, "enforce_eager", "max_seq_len_to_capture", "compilation_config", "cuda_graph_sizes"),
    **ignored(COMPILED, "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"),
    **ignored("kernels are chosen by `kernel_backend`", "attention_backend", "attention_config", "kernel_config"),
    **ignored("kernels are chosen by `kernel_backend`", "moe_backend", "linear_backend", "disable_cascade_attn"),
    **ignored(ONE_ENGINE, "performance_mode", "additional_config", "tokenizer_pool_size", "renderer_num_workers"),
    **ignored(ONE_ENGINE, "guided_decoding_backend", "structured_outputs_config", "tokenizer_mode", "config_format"),
}

_RECORDS = {
    **ignored("no statistics are logged", "disable_log_stats", "disable_log_requests", "enable_log_requests"),
    **ignored("no statistics are logged", "enable_logging_iteration_details", "max_log_len"),
    **ignored("use Python's logging of jaxserve", "log_level", "logging_config", "log_config_file"),
    **ignored("metrics have fixed names (see `metrics_prefix`)", "show_hidden_metrics_for_version", "kv_cache_metrics"),
    **ignored("traces have fixed contents (see `otlp_endpoint`)", "collect_detailed_traces"),
    **ignored("use jax.profiler", "profiler_config", "enable_layerwise_nvtx_tracing"),
    **ignored("closing ends all requests", "shutdown_timeout"),
}

_FORMER = {
    **use(NO_LORA, "enable_lora_bias", "qlora_adapter_name_or_path", "lora_extra_vocab_size", neutral=(False, 0, "")),
    **use("there are no prompt adapters", "enable_prompt_adapter", "max_prompt_adapters", "max_prompt_adapter_token"),
    **use(NO_SPECULATION, "speculative_model_quantization", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
    **use(NO_SPECULATION, "speculative_draft_tensor_parallel_size", "speculative_max_model_len"),
    **ignored(NO_SPECULATION, "num_lookahead_slots", "spec_decoding_acceptance_method"),
    **ignored(NO_SPECULATION, "speculative_disable_mqa_scorer", "speculative_disable_by_batch_size"),
    **ignored(NO_SPECULATION, "disable_logprobs_during_spec_decoding", "long_lora_scaling_factors"),
    **ignored(ONE_ENGINE, "use_v2_block_manager", "disable_async_output_proc", "scheduler_delay_factor"),
    **ignored(ONE_ENGINE, "tokenizer_pool_type", "tokenizer_pool_extra_config", "guided_decoding_disable_fallback"),
    **ignored(ONE_ENGINE, "guided_decoding_disable_any_whitespace", "kv_sharing_fast_prefill", "reasoning_config"),
    **ignored(ONE_PROCESS, "ray_workers_use_nsight", "override_neuron_config", "expert_placement_strategy"),
}

_SGLANG: Mapping[str, OtherName] = {
    **same(
        model_path="model",
        tokenizer_path="tokenizer",
        tp_size="tp",
        pp_size="pp",
        dp_size="dp",
        max_running_requests="max_num_seqs",
        random_seed="seed",
    ),
    **use("use `memory_gb`, or `gpu_memory_utilization` on a GPU", "mem_fraction_static"),
    **use("use `max_num_batched_tokens`, which counts decoded tokens too", "chunked_prefill_size"),
    **use("use `kv_pages`, times `page_size` tokens", "max_total_tokens"),
    **sets("prefix_caching", False, "disable_radix_cache"),
    **sets("overlap", False, "disable_overlap_schedule"),
    **use("experts are split over devices like all weights: use `tp`", "ep_size", neutral=(1,)),
    **use(NO_SPECULATION, "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps"),
    **use(NO_LORA, "lora_paths"),
    **ignored("requests with a smaller priority are served first", "schedule_policy", "schedule_conservativeness"),
    **ignored("kernels are chosen by `kernel_backend`", "sampling_backend", "prefill_attention_backend"),
    **ignored("kernels are chosen by `kernel_backend`", "decode_attention_backend"),
    **ignored(ONE_ENGINE, "grammar_backend", "watchdog_timeout", "enable_mixed_chunk"),
    **ignored(COMPILED, "disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs", "enable_torch_compile"),
}

_LLAMA_CPP: Mapping[str, OtherName] = {
    **use("use `max_model_len`, the tokens of one sequence", "ctx_size"),
    **use("use `max_num_seqs`", "parallel", "n_parallel"),
    **use("use `max_num_batched_tokens`", "batch_size", "ubatch_size", "n_batch"),
    **use("use `kv_cache_dtype`", "cache_type_k", "cache_type_v", "type_k", "type_v"),
    **use("all layers are on the devices: use `tp` or `pp` for several", "n_gpu_layers", "gpu_layers", "tensor_split"),
    **use("use `tp` or `pp` for several devices", "split_mode", "main_gpu"),
    **use("all processors of the process are used: limit them with taskset", "threads", "threads_batch", "n_threads"),
    **use("requests say it in max_tokens", "n_predict", "predict"),
    **use("give the model's name on the hub as `model`", "hf_repo", "hf_file", "model_url"),
    **ignored("kernels are chosen by `kernel_backend`", "flash_attn"),
    **ignored("weights are read once, and stay in memory", "mlock", "mmap", "use_mmap", "use_mlock"),
    **ignored("it is always so", "jinja", "cont_batching"),
}

_VLLM = _RENAMED | _MODEL | _MEMORY | _SCHEDULING | _DEVICES | _KERNELS | _RECORDS | _FORMER
ENGINE: Mapping[str, OtherName] = {**_VLLM, **_SGLANG, **_LLAMA_CPP, **_VLLM}  # vLLM first, and with precedence

ALWAYS = (True, False)
_SERVER: Mapping[str, OtherName] = {
    **sets("log_interval", 0, "disable_log_stats"),
    **same(model="model", uvicorn_log_level="log_level", allowed_origins="cors_origins", alias="served_model_names"),
    **same(ssl_key_file="ssl_keyfile", ssl_cert_file="ssl_certfile"),
    **use("it is always so", "enable_auto_tool_choice", "enable_server_load_tracking", neutral=ALWAYS),
    **use("it is always so", "enable_prompt_tokens_details", "enable_request_id_headers", neutral=ALWAYS),
    **use("it is always so", "exclude_tools_when_tool_choice_none", "enable_metrics", "metrics", neutral=ALWAYS),
    **use("it is always so", "enable_ssl_refresh", neutral=ALWAYS),
    **use("it is always so", "enable_offline_docs", "embedding", "embeddings", "allow_credentials", neutral=ALWAYS),
    **use("content is given to the template as text", "chat_template_content_format", neutral=("auto", "string")),
    **use("the role is always assistant", "response_role", neutral=("assistant",)),
    **use("requests ask for it with return_tokens_as_token_ids", "return_tokens_as_token_ids"),
    **use("requests ask for it with stream_options", "enable_force_include_usage"),
    **use("requests cannot bring a template: use `chat_template`", "trust_request_chat_template"),
    **use("tools are run by clients", "tool_server"),
    **use("put a proxy in front of the server", "middleware"),
    **use("one process serves: start several, on ports of their own, behind a balancer", "api_server_count"),
    **use("one process serves: start several, on ports of their own, behind a balancer", "headless", "tokens_only"),
    **use("use `api_key`, or `config` with a file", "api_key_file"),
    **use("use `access_log`, which logs the path and the status of every request", "log_requests"),
    **ignored("prompts and answers are never logged: see `access_log`", "enable_log_requests", "enable_log_outputs"),
    **ignored("prompts and answers are never logged: see `access_log`", "enable_log_deltas", "max_log_len"),
    **ignored("requests are only logged with `access_log`", "disable_uvicorn_access_log", "disable_log_requests"),
    **ignored("see `log_level`", "log_error_stack", "log_disable", "verbose"),
    **ignored("a line of all steps is logged every `log_interval` seconds", "enable_logging_iteration_details"),
    **use("use `log_config_file`", "logging_config"),
    **ignored("heads of requests have a fixed limit", "h11_max_incomplete_event_size", "h11_max_header_count"),
    **ignored("pages of `cors_origin` may use all methods and headers", "allowed_methods", "allowed_headers"),
    **ignored("one process serves", "disable_frontend_multiprocessing", "data_parallel_supervisor_port"),
    **ignored("it is not part of this server", "disable_fastapi_docs", "enable_tokenizer_info_endpoint", "webui"),
    **ignored("it is not part of this server", "cohere_is_reasoning_model", "cohere_format", "slots"),
    **ignored("it is not part of this server", "fingerprint_mode", "fingerprint_value", "enable_per_request_metrics"),
    **ignored("variables of vLLM are not read, and named at the start", "fail_on_environ_validation"),
    **ignored("`reasoning_parser` alone decides", "enable_reasoning"),
    **ignored("`access_log` leaves probes out", "disable_access_log_for_endpoints"),
    **use("TLS 1.2 and 1.3 have the ciphers of OpenSSL's defaults", "ssl_ciphers"),
    **use("use `precision`, and any model for embeddings", "is_embedding"),
    # Options of engines, with what to do instead on a command line.
    **use("models generate, chat and embed alone", "task", "runner", "convert", neutral=TASKS),
    **use("requests give their sampling parameters", "logits_processors", "logits_processor_pattern"),
    **use("stop the server, and start it again", "enable_sleep_mode"),
    **use("set the environment variable HF_TOKEN, which other users of the machine cannot see", "hf_token"),
}

_REQUESTS = use(
    "requests say it: `override_generation_config` sets what they leave out",
    *("temp", "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "repetition_penalty"),
)

COMMAND_LINE: Mapping[str, OtherName] = {**ENGINE, **_SERVER, **_REQUESTS}

TERMINAL: Mapping[str, OtherName] = {
    **ENGINE,
    **_SERVER,
    **same(n_predict="max_tokens", predict="max_tokens", num_predict="max_tokens", max_new_tokens="max_tokens"),
    **same(temp="temperature", repeat_penalty="repetition_penalty"),
    **ignored("answers and errors are all that is written", "verbose"),
}
"""The options that commands which answer in the terminal take or explain."""

SHORT = {
    **{"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"},
    **{"-q": "quantization", "-O": "optimization_level", "-cc": "compilation_config", "-ac": "attention_config"},
    **{"-sc": "speculative_config", "-ep": "enable_expert_parallel", "-n": "n_predict", "-a": "alias"},
    **{"-m": "model_path", "-c": "ctx_size", "-b": "batch_size", "-ub": "ubatch_size", "-np": "parallel"},
    **{"-ngl": "n_gpu_layers", "-t": "threads", "-tb": "threads_batch", "-fa": "flash_attn", "-hf": "hf_repo"},
    **{"-ctk": "cache_type_k", "-ctv": "cache_type_v", "-sm": "split_mode", "-ts": "tensor_split", "-v": "verbose"},
}
"""The short names of these options on command lines. vLLM's `-O` is followed by its value without a space."""

_SWITCH_BEGINNINGS = (
    "enable_",
    "disable_",
    "use_",
    "skip_",
    "return_",
    "allow_",
    "load_in_",
    "log_error",
    "tokens_only",
)
_SWITCHES = frozenset(
    {
        *("trust_remote_code", "enforce_eager", "async_scheduling", "fully_sharded_loras", "calculate_kv_scales"),
        *("language_model_only", "interleave_mm_strings", "mm_encoder_only", "numa_bind", "worker_use_ray", "headless"),
        *("data_parallel_hybrid_lb", "data_parallel_external_lb", "trust_request_chat_template", "kv_cache_metrics"),
        *("multi_step_stream_outputs", "ray_workers_use_nsight", "show_hidden_metrics", "cohere_is_reasoning_model"),
        *("exclude_tools_when_tool_choice_none", "kv_sharing_fast_prefill", "log_requests", "is_embedding"),
        *("skip_mm_profiling", "speculative_disable_mqa_scorer", "guided_decoding_disable_fallback"),
        *("guided_decoding_disable_any_whitespace", "jinja", "cont_batching", "mlock", "mmap", "metrics", "embedding"),
        *("embeddings", "slots", "webui", "log_disable", "verbose", "fail_on_environ_validation"),
    }
)
_LISTS = frozenset(
    {
        *("cuda_graph_sizes", "cudagraph_capture_sizes", "cuda_graph_bs", "ignore_patterns", "allowed_media_domains"),
        *("collect_detailed_traces",),
    }
)


def takes_value(name: str) -> bool:
    """Return whether an option of another engine is followed by a value on its command line."""
    if name == "disable_access_log_for_endpoints":
        return True
    return name not in _SWITCHES and not name.startswith(_SWITCH_BEGINNINGS)


def takes_values(name: str) -> bool:
    """Return whether an option of another engine that is ignored may be followed by several values."""
    return name in _LISTS
