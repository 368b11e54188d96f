"""The options of vLLM's engines that have another name here, or none."""

from collections.abc import Mapping

from jaxserve.core.keywords import OtherName, ignored, same, use
from jaxserve.core.vllm_names import NO_LORA, TEXT_ONLY

LOCAL = "models are local folders: download the revision, and give its folder"
OWN_FORMAT = "use precision; a checkpoint in the format of AWQ, GPTQ or compressed-tensors runs in its own"
ONE_ENGINE = "the engine chooses this itself"
ONE_PROCESS = "an engine runs in one process, on its devices (see tp, pp and dp)"
COMPILED = "all programs are compiled (see warmup)"
ON_DEVICE = "weights stay on the device: use precision for smaller ones"
POOLED = "embeddings are normalised last hidden states"
NO_SPECULATION = "there is no speculative decoding"
NOT_RETURNED = "it is not returned"

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

_MODEL: Mapping[str, OtherName] = {
    **use(OWN_FORMAT, "quantization", "quantization_config", "quantization_param_path", "load_in_8bit", "load_in_4bit"),
    **use(OWN_FORMAT, "allow_deprecated_quantization"),
    **use("use max_model_len", "max_length", "max_seq_len", "context_length", "n_ctx"),
    **use(LOCAL, "revision", "code_revision", "tokenizer_revision", "download_dir", "hf_token", "hf_config_path"),
    **use("give the folder as model", "model_weights"),
    **use("change config.json in the model's folder", "hf_overrides", "rope_scaling", "rope_theta"),
    **use("change config.json in the model's folder", "model_class_overrides", "disable_sliding_window"),
    **use(NO_LORA, "enable_lora", "lora_modules", "default_mm_loras", "lora_target_modules"),
    **ignored(NO_LORA, "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "fully_sharded_loras"),
    **use(
        "use generate, chat or embed of any model", "task", "runner", "convert", neutral=("auto", "generate", "none")
    ),
    **use(POOLED, "pooler_config", "override_pooler_config"),
    **use("give prompts as text or token ids", "enable_prompt_embeds"),
    **use("give SamplingParams with each call", "override_generation_config", neutral=({},)),
    **use("SamplingParams have fixed defaults", "generation_config", neutral=("auto", "vllm")),
    **use("use logit_bias, bad_words or structured of SamplingParams", "logits_processors"),
    **use("use jaxserve.parsing", "reasoning_parser", "reasoning_parser_plugin", "tool_parser"),
    **use("there is no watermarking", "watermark_config"),
    **use("log-probabilities are those of the raw logits", "logprobs_mode", neutral=("raw_logprobs",)),
    **use(NOT_RETURNED, "enable_return_routed_experts", "return_sampling_mask", "enable_trace_replay"),
    **ignored("no code of a model's folder is ever run", "trust_remote_code"),
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

_MEMORY: Mapping[str, OtherName] = {
    **use("use memory_gb, the memory budget in GB", "gpu_memory_utilization", "kv_cache_memory_bytes", "memory"),
    **use("use precision or kv_cache_dtype", "kv_cache_precision", "kv_cache_dtype_skip_layers"),
    **use("KV pages stay on the device", "kv_offloading_size", "kv_transfer_config", "kv_events_config", neutral=(0,)),
    **use(ON_DEVICE, "cpu_offload_gb", "offload_group_size", neutral=(0,)),
    **use(ON_DEVICE, "offload_params", "cpu_offload_params", neutral=([], set())),
    **ignored(ON_DEVICE, "offload_backend", "offload_num_in_group", "offload_prefetch_step", "kv_offloading_backend"),
    **ignored("preempted sequences are computed again", "swap_space", "preemption_mode"),
    **ignored("use close, and a new LLM", "enable_sleep_mode", "sleep_mode_backend", "enable_cumem_allocator"),
    **ignored(ONE_ENGINE, "calculate_kv_scales", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager"),
    **ignored("models have attention alone", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size"),
}

_SCHEDULING: Mapping[str, OtherName] = {
    **use(NO_SPECULATION, "speculative_config", "speculative_model", "num_speculative_tokens"),
    **use(NO_SPECULATION, "spec_method", "spec_model", "spec_tokens"),
    **use("prompts are always computed in chunks", "enable_chunked_prefill", neutral=(True,)),
    **use("requests with a smaller priority are served first", "scheduling_policy", neutral=("fcfs", "priority")),
    **use("use max_num_seqs", "max_num_active_seqs"),
    **use("use max_num_batched_tokens", "max_num_scheduled_tokens"),
    **ignored("chunks are as long as max_num_batched_tokens lets them be", "long_prefill_token_threshold"),
    **ignored("chunks are as long as max_num_batched_tokens lets them be", "max_num_partial_prefills"),
    **ignored("chunks are as long as max_num_batched_tokens lets them be", "max_long_partial_prefills"),
    **ignored("each token is sent at once", "stream_interval", "num_scheduler_steps", "multi_step_stream_outputs"),
    **use("use policy", "scheduler_cls"),
}

_DEVICES: Mapping[str, OtherName] = {
    **use(ONE_PROCESS, "nnodes", "prefill_context_parallel_size", "decode_context_parallel_size", neutral=(1,)),
    **use(ONE_PROCESS, "node_rank", "data_parallel_rank", "data_parallel_start_rank", neutral=(0,)),
    **use(ONE_PROCESS, "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "device_ids"),
    **use(ONE_PROCESS, "data_parallel_hybrid_lb", "data_parallel_external_lb", "worker_cls", "worker_extension_cls"),
    **use("experts are split over devices like all weights: use tp", "enable_expert_parallel", "enable_eplb"),
    **use("use policy and max_tp, with which instances merge and split", "enable_elastic_ep"),
    **ignored(ONE_PROCESS, "master_addr", "master_port", "data_parallel_backend", "distributed_timeout_seconds"),
    **ignored(ONE_ENGINE, "distributed_executor_backend", "worker_use_ray", "disable_custom_all_reduce", "device"),
    **ignored(ONE_ENGINE, "eplb_config", "all2all_backend", "enable_dbo", "ubatch_size", "numa_bind"),
}

_KERNELS: Mapping[str, OtherName] = {
    **ignored(COMPILED, "enforce_eager", "max_seq_len_to_capture", "compilation_config", "cuda_graph_sizes"),
    **ignored(COMPILED, "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"),
    **ignored("kernels are chosen by kernel_backend", "attention_backend", "attention_config", "kernel_config"),
    **ignored("kernels are chosen by kernel_backend", "moe_backend", "linear_backend", "disable_cascade_attn"),
    **ignored(ONE_ENGINE, "performance_mode", "additional_config", "tokenizer_pool_size", "renderer_num_workers"),
    **ignored(ONE_ENGINE, "guided_decoding_backend", "structured_outputs_config", "tokenizer_mode", "config_format"),
}

_RECORDS: Mapping[str, OtherName] = {
    **ignored("no statistics are logged", "disable_log_stats", "disable_log_requests", "enable_log_requests"),
    **ignored("no statistics are logged", "enable_logging_iteration_details", "max_log_len"),
    **ignored("use Python's logging of jaxserve", "log_level", "logging_config", "log_config_file"),
    **ignored("metrics have fixed names (see metrics_prefix)", "show_hidden_metrics_for_version", "kv_cache_metrics"),
    **ignored("traces have fixed contents (see otlp_endpoint)", "collect_detailed_traces"),
    **ignored("use jax.profiler", "profiler_config", "enable_layerwise_nvtx_tracing"),
    **ignored("closing ends all requests", "shutdown_timeout"),
}

ENGINE: Mapping[str, OtherName] = {**_RENAMED, **_MODEL, **_MEMORY, **_SCHEDULING, **_DEVICES, **_KERNELS, **_RECORDS}
