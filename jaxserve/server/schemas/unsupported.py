"""Fields of other servers' APIs that would change the answer if they were supported.

Ignoring such a field would give a wrong answer with status 200. Each is refused by name, with the field to send
instead if one exists. A field that is neither in these tables nor in `harmless` is refused too, but without such advice
and whatever its value, because nobody knows what it would do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.core.errors import UnsupportedParameter
from jaxserve.core.keywords import EMPTY, is_one_of
from jaxserve.server.schemas.left_out import HINT

OFF = (0, False)
NO_TOOL = ("none", "auto", {"type": "none"}, {"type": "auto"})

# The values of fields for generation that ask for nothing. Bodies that do not define such a field accept these.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "temperature", "top_p", "repetition_penalty"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(
        ("include_reasoning", "add_generation_prompt", "parallel_tool_calls", "skip_special_tokens"), (True,)
    ),
    **dict.fromkeys(
        ("include_stop_str_in_output", "ignore_eos", "logprobs", "prompt_logprobs", "stream", "echo"), (False,)
    ),
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words"), ([],)),  # an empty stop string is a mistake
    "top_k": (0, -1),
    "seed": (-1,),
    "logit_bias": ({},),
    "structured_outputs": ({},),
    "guided_choice": ([],),
    "stream_options": ({}, {"include_usage": False}),
    "response_format": ({}, {"type": "text"}),
    "tool_choice": NO_TOOL,
    "thinking_token_budget": (-1,),
    "enable_thinking": (),  # both values ask for something
}


@dataclass(frozen=True)
class Unsupported:
    """The reason why a field is refused, and the `neutral` values with which it changes nothing and is accepted."""

    reason: str
    neutral: tuple[Any, ...]


def check_unsupported(given: Mapping[str, Any], table: Mapping[str, Unsupported], place: str = "") -> None:
    """Raise UnsupportedParameter if a given field is in the table.

    `place` is the prefix of the field in the error: its parent and a dot.
    """
    for name, value in given.items():
        unsupported = table.get(name)
        if unsupported is not None and value is not None and not is_one_of(value, unsupported.neutral):
            raise UnsupportedParameter(f"{name} is not supported{unsupported.reason}", field=place + name, value=value)


def asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a field for generation has a value that changes nothing."""
    return is_one_of(value, NEUTRAL.get(name, ()))


def unsupported(name: str, reason: str = "", neutral: tuple[Any, ...] | None = None) -> Unsupported:
    """Return the refusal of a field. By default the values that are empty or ask for nothing are `neutral`."""
    return Unsupported(reason, NEUTRAL.get(name, EMPTY) if neutral is None else neutral)


def _because(reason: str, *names: str, neutral: tuple[Any, ...] | None = None) -> dict[str, Unsupported]:
    return {name: unsupported(name, f": {reason}", neutral) for name in names}


def _use(field: str, *names: str, neutral: tuple[Any, ...] | None = None) -> dict[str, Unsupported]:
    return _because(f"use {field}", *names, neutral=neutral)


def _refused(*names: str, neutral: tuple[Any, ...] | None = None) -> dict[str, Unsupported]:
    return {name: unsupported(name, "", neutral) for name in names}


UNSUPPORTED_IN_PROMPTS: Mapping[str, Unsupported] = {
    **_use("tools", "functions"),
    **_because("tools are for /v1/chat/completions", "tools"),
    **_because("the client must call these tools itself", "mcp_servers"),
    **_use("truncate_prompt_tokens", "truncate", "truncation", neutral=(False, "disabled", "NONE", "None")),
    **_use("truncate_prompt_tokens", "prompt_truncate_len", neutral=()),
    **_use("truncate_prompt_tokens", "context_length_exceeded_behavior", neutral=("error",)),
    **_because("a prompt's last tokens are kept", "truncation_side", "truncation_direction", neutral=("left", "Left")),
    **_because("send the text in a message", "documents", "context", "input_extra", "files", "data_sources"),
    **_because("this model reads text only", "images", "image_data", "audio_data", "video_data"),
    **_because("send it as a message with role system", "system", "instructions", "instruction"),
    **_because("send the token ids as prompt to /v1/completions", "input_ids"),
    **_refused("prompt_embeds", "input_embeds", "negative_prompt", "safe_prompt", "input_prefix", "input_suffix"),
    **_refused("prompt_name", "input_type", "task", "context_shift", "raw", "plugins", "tool_ids", "session_params"),
    **_use("cache_salt", "extra_key"),
    **_use("add_special_tokens", "add_bos_token", neutral=(True,)),
    **_because("the model's own template is used", "chat_template", "template", "prompt_template"),
    **_because("it is for /v1/chat/completions", "chat_template_kwargs", "continue_final_message"),
    **_because("it is for /v1/chat/completions", "enable_thinking", neutral=(False,)),
    **_because("it is for /v1/chat/completions", "add_generation_prompt", neutral=(True,)),
    **_because("it is for /v1/chat/completions", "messages"),
    **_because("it is for /v1/chat/completions", "reasoning_effort", neutral=("", "none")),
    **_because("use reasoning_effort in /v1/chat/completions", "reasoning"),
    **_because("it is for /v1/completions", "prompt"),
    **_use("enable_thinking or chat_template_kwargs", "think", "thinking", neutral=()),
    **_refused("truncate_prompt_tokens"),
}

UNSUPPORTED: Mapping[str, Unsupported] = {
    **UNSUPPORTED_IN_PROMPTS,
    # tools, and structured output under other names
    **_use("tool_choice", "function_call", neutral=NO_TOOL),
    **_because("tools are for /v1/chat/completions", "tool_choice"),
    **_use("response_format", "format", "response_schema", neutral=("",)),
    **_use("grammar", "grammar_string", neutral=("",)),
    **_refused("guided_whitespace_pattern"),
    # lengths and stops under other names
    **_use("max_tokens", "n_predict", "num_predict", "max_new_tokens", "max_length", "max_gen_len", neutral=()),
    **_use("max_tokens", "max_output_tokens", "max_tokens_to_sample", "max_completion_tokens", neutral=()),
    **_use("min_tokens", "min_new_tokens", "min_length", "minimum_message_content_tokens", neutral=(0,)),
    **_use("stop", "stop_sequences", "stop_sequence", "stop_strings", "stopping_strings", "custom_stopping_strings"),
    **_use("stop", "stop_words", "stop_regex"),
    **_use("stop_token_ids", "eos_token_id", "end_id", neutral=()),
    **_use("ignore_eos", "ban_eos_token", neutral=(False,)),
    **_use("include_stop_str_in_output", "no_stop_trim", neutral=(False,)),
    **_refused("t_max_predict_ms", "max_time", "n_indent", neutral=(0, -1)),
    # sampling under other names
    **_use("seed", "random_seed", "sampling_seed", neutral=()),
    **_use("seed", "sampler_seed", neutral=(-1,)),
    **_use("n", "num_return_sequences", "n_cmpl", neutral=(1,)),
    **_use("repetition_penalty", "repeat_penalty", "rep_pen", neutral=(1,)),
    **_use("temperature 0", "do_sample", neutral=(True,)),
    **_use("logit_bias", "logits_bias", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    **_use("bad_words", "bad_words_ids", "banned_strings", "banned_tokens", "custom_token_bans"),
    # unsupported sampling
    **_refused("use_beam_search", "logits_processors", "logits_processor", "custom_logit_processor", "custom_params"),
    **_refused("vllm_xargs", "samplers", "sampler_priority", "sampler_order", "temperature_last", "watermark"),
    **_refused("watermarking"),
    **_refused("dynamic_temperature", "force_words_ids", "repetition_detection", "exponential_decay_length_penalty"),
    **_refused("forced_bos_token_id", "forced_eos_token_id", "logprob_token_ids", "token_ids_logprob", neutral=()),
    **_refused("num_beams", "beam_width", "length_penalty", "len_penalty", "guidance_scale", neutral=(1,)),
    **_refused("typical_p", "typical", "tfs_z", "tfs", "encoder_repetition_penalty", neutral=(1,)),
    **_refused("mirostat", "mirostat_mode", "dynatemp_range", "xtc_probability", "dry_multiplier", neutral=OFF),
    **_refused("top_a", "min_keep", "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "skew", neutral=OFF),
    **_refused("penalty_alpha", "diversity_penalty", "no_repeat_ngram_size", neutral=OFF),
    **_refused("top_n_sigma", "nsigma", "adaptive_target", neutral=(0, -1)),
    **_because("penalties look at all tokens", "repeat_last_n", neutral=(-1,)),
    **_because("penalties look at all tokens", "rep_pen_range", "repetition_penalty_range", neutral=(-1, 0)),
    **_refused("penalize_nl", neutral=(False,)),
    **_use("echo", "return_full_text", neutral=(False,)),
    # reasoning
    **_use("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget", neutral=(-1,)),
    **_because("it is for /v1/chat/completions", "thinking_token_budget"),
    **_because("it is for /v1/chat/completions", "include_reasoning"),
    **_use("include_reasoning", "separate_reasoning", neutral=(True,)),
    **_use("include_reasoning", "reasoning_format", neutral=("auto", "deepseek")),
    **_refused("stream_reasoning", neutral=(True,)),
    # contents of the answer
    **_because("it is for /v1/completions", "echo", "suffix"),
    **_refused("enable_code_interpreter", "translation_options"),
    **_refused("enable_search", "search_options"),
    **_refused("search_parameters", "web_search_options", neutral=()),  # {} asks for a search with all defaults
    **_because("an answer is sent in the response to its request", "background", "deferred"),
    **_because("an answer of this endpoint is sent as a whole", "stream", neutral=(False,)),
    **_refused("best_of"),
    **_use("logprobs", "top_logprobs", "top_logprobs_num", "n_probs", "top_n_tokens", neutral=(0,)),
    **_use("logprobs", "return_logprob", "details", neutral=(False,)),
    **_use("prompt_logprobs", "decoder_input_details", neutral=(False,)),
    **_use("prompt_logprobs", "logprob_start_len", neutral=(-1,)),
    **_use("return_token_ids", "return_tokens", "return_prompt_token_ids", neutral=(False,)),
    **_use("return_token_ids", "detokenize", neutral=(True,)),
    **_refused("return_token_ids", "return_tokens_as_token_ids", "return_text_in_logprobs", "post_sampling_probs"),
    **_refused("return_hidden_states", "return_routed_experts", "response_fields", "return_meta_info"),
    **_refused("return_prompt_text", "return_token_offsets", "return_cached_tokens_details"),
    **_because("this model writes text only", "audio"),
    **_because("this model writes text only", "modalities", neutral=(["text"], [])),
    **_because("this model has one verbosity", "verbosity", neutral=("medium",)),
    **_because("a stream holds what is new", "incremental_output", neutral=(True,)),
    **_refused("result_format", neutral=("message",)),
    # embeddings
    **_refused("late_chunking", "pooling"),
    **_use("dimensions", "output_dimension", neutral=()),
    **_because("embeddings have length 1", "normalize", "normalized", "use_activation", neutral=(True,)),
    **_because("embeddings are little-endian float32", "embed_dtype", "output_dtype", neutral=("float32", "float")),
    **_because("embeddings are little-endian float32", "endianness", neutral=("native", "little")),
    # models and containers of parameters
    **_because("adapters are not served", "lora", "lora_path", "lora_adapters", "lora_request", "adapter_id"),
    **_because("this server computes prompts itself", "kv_transfer_params", "ec_transfer_params"),
    **_because("this server computes prompts itself", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    **_because("give its fields at the top level", "options", "parameters", "params", "sampling_params", "extra_body"),
    **_because("give its fields at the top level", "generation_config", "generationConfig"),
}

UNSUPPORTED_IN_TOKENIZE: Mapping[str, Unsupported] = {
    **UNSUPPORTED_IN_PROMPTS,
    **_use("prompt", "content"),
    **_use("add_special_tokens", "add_special", neutral=()),
    **_use("return_token_strs", "with_pieces", neutral=(False,)),
}

UNSUPPORTED_IN_DETOKENIZE: Mapping[str, Unsupported] = {
    **_use("tokens", "token_ids", "ids", "input_ids"),
    **_because("special tokens are part of the text", "skip_special_tokens", neutral=(False,)),
}

UNSUPPORTED_IN_MESSAGES: Mapping[str, Unsupported] = {
    **_use("tool_calls", "function_call"),
    **_because(f"this model reads text only ({HINT})", "images", "audio", "videos"),
    **_use("continue_final_message, with add_generation_prompt false,", "prefix", "partial"),
    **_use("reasoning_content", "thinking"),
    **_because("send it as content", "parts"),
    **_refused("invalid_tool_calls"),
}

CROSS_ENCODER = "this model is not a cross-encoder: a score is the cosine of two embeddings"
UNSUPPORTED_IN_SCORING: Mapping[str, Unsupported] = {
    **UNSUPPORTED,
    **_because(CROSS_ENCODER, "use_activation", "activation", "softmax", "raw_scores"),
    **_because(CROSS_ENCODER, "instruction", "instructions", "instruct", "task"),
    **_because(CROSS_ENCODER, "chat_template", "chat_template_kwargs", "score_template", "prompt_template"),
    **_because("scores are those of whole embeddings", "dimensions", "output_dimension", neutral=()),
    **_because("this model reads text only", "mm_processor_kwargs"),
    **_use("truncate_prompt_tokens", "max_tokens_per_doc", "max_chunks_per_doc", "max_query_length", neutral=()),
    **_use("max_tokens_per_doc", "max_doc_length", neutral=()),
    **_use("truncate_prompt_tokens", "overlap", "overlap_tokens", neutral=()),
    **_because("give the text to rank by as text", "rank_fields"),
    **_use("documents", "texts"),
    **_use("return_documents", "return_text"),
    **_refused("return_embeddings"),
}

UNSUPPORTED_IN_DOCUMENTS: Mapping[str, Unsupported] = {
    **_because("this model reads text only", "image", "images", "audio", "video", "multi_modal", "content"),
}

UNSUPPORTED_IN_RESPONSES: Mapping[str, Unsupported] = {
    **UNSUPPORTED,
    **_use("input", "messages"),
    **_use("max_output_tokens", "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", neutral=()),
    **_use("max_output_tokens", "num_predict", "max_length", "max_gen_len", "max_tokens_to_sample", neutral=()),
    **_use("text.format", "response_format", "format", "response_schema"),
    **_use("reasoning.effort", "reasoning_effort", neutral=("", "none")),
    **_use("text.verbosity", "verbosity", neutral=("medium",)),
    **_use("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    **_use("structured_outputs", "json_schema", "grammar", "regex", "ebnf"),
    **_use("include", "logprobs"),
    **_refused("n"),
    **_refused("conversation", "prompt", "context_management", "moderation", "background_options"),
    **_refused("image", "access_programs", "personality"),
    **_refused("prompt_logprobs", "return_token_ids", "enable_response_messages", "previous_input_messages"),
    **_because("the model chooses what it shows of earlier reasoning", "context", neutral=("auto",)),
    **_because("this model has one mode", "mode", neutral=("standard",)),
}
