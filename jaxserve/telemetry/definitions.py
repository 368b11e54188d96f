"""The metrics of an engine: their names, labels, help texts and buckets, and the names that vLLM gives to the same.

Names of counters are without the suffix `_total`, which Prometheus' format adds.
"""

from collections.abc import Mapping

from jaxserve.telemetry.histogram import one_two_five

TIME_BOUNDS = one_two_five(1e-3, 1000.0)  # seconds
TOKEN_BOUNDS = one_two_five(1, 100_000)
STEP_TOKEN_BOUNDS = tuple(2**power for power in range(15))
COUNT_BOUNDS = (1, 2, 5, 10, 20, 50)
STEP_BOUNDS = one_two_five(1e-4, 10.0)  # seconds

# -- of an instance

GAUGES = {
    "num_requests_running": "Sequences being computed.",
    "num_requests_waiting": "Sequences waiting to be computed.",
    "num_tokens_waiting": "Prompt tokens of the waiting sequences.",
    "kv_cache_usage_perc": "Share of the KV pages in use; 1 is 100 percent.",
    "kv_pages_total": "KV pages of the pool.",
    "kv_pages_used": "KV pages held by sequences.",
    "kv_bytes": "Bytes of the KV pools.",
    "weight_bytes": "Bytes of the resident weights.",
    "plan_version": "Version of the plan in force.",
}
LABELLED_GAUGES = {  # name: (label, help)
    "num_requests_waiting_by_reason": (
        "reason",
        "Waiting sequences: for slots and pages (capacity), or for the prompt that another answer shares (deferred).",
    ),
    "layers_by_precision": ("precision", "Decoder layers by precision."),
}
CAPACITY_GAUGES = {
    "kv_capacity_tokens": "Tokens that the KV pages of the plan in force hold.",
    "kv_capacity_max_tokens": "Tokens that the KV pages would hold after all changes that the policy may make.",
    "kv_capacity_max_seconds": "Seconds that the changes to kv_capacity_max_tokens are estimated to take.",
}
INSTANCE_INFO = ("instance_info", "name", "The name of the instance whose number is the label engine.")
INFO = ("cache_config_info", "How the KV cache is set up.")
COUNTERS = {
    "num_preemptions": "Sequences preempted.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "non_finite_outputs": "Requests ended because the model computed NaN or infinity for them.",
    "instance_failures": "Failures of the instance, after which it computes nothing more.",
}
SUCCESS = ("request_success", "finished_reason", "Finished requests by reason.")  # name, label, help
HISTOGRAMS = {
    "time_to_first_token_seconds": (TIME_BOUNDS, "Seconds from arrival to the first token."),
    "inter_token_latency_seconds": (STEP_BOUNDS, "Seconds between two tokens of a sequence."),
    "request_time_per_output_token_seconds": (STEP_BOUNDS, "Mean seconds per token after the first."),
    "e2e_request_latency_seconds": (TIME_BOUNDS, "Seconds from arrival to the end of a request."),
    "request_queue_time_seconds": (TIME_BOUNDS, "Seconds from arrival to the first step."),
    "request_prompt_tokens": (TOKEN_BOUNDS, "Prompt tokens of a request."),
    "request_prefill_kv_computed_tokens": (TOKEN_BOUNDS, "Prompt tokens of a request that no prefix cache held."),
    "request_prefill_time_seconds": (TIME_BOUNDS, "Seconds from the first step to the first token."),
    "request_decode_time_seconds": (TIME_BOUNDS, "Seconds from the first token to the last."),
    "request_inference_time_seconds": (TIME_BOUNDS, "Seconds from the first step to the last token."),
    "request_generation_tokens": (TOKEN_BOUNDS, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (TOKEN_BOUNDS, "Tokens of the longest answer of a request."),
    "request_params_n": (COUNT_BOUNDS, "Answers that a request asked for."),
    "request_params_max_tokens": (TOKEN_BOUNDS, "Value of max_tokens of a request that set it."),
    "iteration_tokens": (STEP_TOKEN_BOUNDS, "Tokens of a step."),
    "iteration_seconds": (STEP_BOUNDS, "Seconds of a step."),
}

# -- of the engine as a whole

WAITING_ROOM_GAUGES = {  # name: (field of `WaitingRoom`, help)
    "waiting_room_requests": ("count", "Requests that no instance can hold before the plan changes."),
    "waiting_room_tokens": ("tokens", "Prompt tokens of the requests in the waiting room."),
    "waiting_room_longest_tokens": ("longest", "Tokens that an instance must hold to serve all of these requests."),
    "waiting_room_oldest_seconds": ("oldest_wait", "Seconds since the arrival of the first of these requests."),
}
QUALITY_GAUGES = {  # name: (field of `Quality`, help)
    "quality_loss_ratio": (
        "loss",
        "Rise of the cross-entropy that the plan in force is expected to cause, as a share.",
    ),
    "quality_loss_nats": ("nats", "The same in nats a token; not there if it was not measured on this model."),
    "quality_floor_ratio": ("floor", "Largest share that the policy accepts; not there if it accepts every one."),
    "quality_measured": ("measured", "1 if the loss was measured on this model, 0 if it is assumed."),
}
ENGINE_COUNTERS = {  # name: (labels, help)
    "admission_rejections": (("reason",), "Requests refused at admission by reason."),
    "compilations": (("tier",), "Executables compiled by tier."),
    "transitions": (("kind", "outcome"), "Plan transitions by kind and outcome."),
    "decisions": (("policy", "outcome"), "Decisions about the plan by policy and outcome."),
    "kv_exchange_chunks": ((), "Chunks of KV pages that were exchanged after layers were dropped or restored."),
    "kv_exchange_bytes": ((), "Bytes of these chunks that crossed links between devices."),
    "kv_exchange_seconds": ((), "Seconds in which such KV pages were on their way."),
    "kv_exchange_held_seconds": ((), "Seconds that sequences waited for such pages, added up over the sequences."),
}
TRANSITION_SECONDS = ("transition_seconds", "Seconds of a plan transition.")
BUILD_INFO = ("build_info", "Always 1; the labels describe the program and the device.")

# Label values that are known before anything is counted. These counters begin at 0: a rate sees nothing of the first
# count of a counter that begins with it.
TRANSITION_KINDS = ("SwapPrecision", "ResizeKVPool", "LimitSequences", "SetDraining")
KNOWN_LABELS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "admission_rejections": (("queue_full",), ("invalid",)),
    "compilations": (("block",), ("fused",), ("ahead",)),
    "transitions": tuple((kind, outcome) for kind in TRANSITION_KINDS for outcome in ("done", "failed")),
    **{name: ((),) for name, (labels, _) in ENGINE_COUNTERS.items() if not labels},
}

# -- of the HTTP server

HTTP_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)  # seconds
HTTP_REQUESTS = (
    "http_requests",
    ("method", "handler", "status"),
    "HTTP requests by method, endpoint and kind of status.",
)
HTTP_SECONDS = (
    "http_request_duration_seconds",
    ("method", "handler"),
    "Seconds from the head of an HTTP request to the end of its response.",
)

# Names in vLLM without its prefix.
VLLM_BARE_NAMES = frozenset({HTTP_REQUESTS[0], HTTP_SECONDS[0]})
# Names in vLLM: first the present one, then those of earlier versions, which boards and autoscalers still use.
VLLM_NAMES = {
    name: (name,)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "cache_config_info",
        "num_preemptions",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    )
} | {
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "iteration_tokens": ("iteration_tokens_total",),
    "non_finite_outputs": ("corrupted_requests",),
}
