"""The keyword arguments of vLLM's library that have another name here, or none."""

from collections.abc import Mapping

from jaxserve.core.keywords import OtherName, same, use

ONE = (1,)
TEXT_ONLY = "models read text only"
NO_LORA = "LoRA adapters are not supported: merge them into the model's weights"
SAMPLING: Mapping[str, OtherName] = {
    **same(structured_outputs="structured"),
    **use(
        "use structured=StructuredOutput(json=..., regex=..., choice=... or grammar=...)",
        *("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format"),
        *("json_schema", "json", "regex", "choice", "grammar", "format"),
    ),
    **use("use max_tokens", "max_new_tokens", "max_completion_tokens", "max_length", "n_predict", "num_predict"),
    **use("use min_tokens", "min_new_tokens", "min_length"),
    **use("use repetition_penalty", "repeat_penalty"),
    **use("use stop", "stop_sequences", "stop_strings", "stop_words"),
    **use("use logprobs, the number of alternatives", "top_logprobs", "return_logprobs", "output_logprobs"),
    **use("it is the LLM's option max_model_len", "num_ctx", "max_model_len"),
    **use("use temperature=0 for the likeliest tokens", "do_sample", neutral=(True,)),
    **use("there is no beam search: use n", "use_beam_search", "early_stopping"),
    **use("there is no beam search: use n", "beam_width", "num_beams", "best_of", "length_penalty", neutral=ONE),
    **use("use logit_bias, bad_words, allowed_token_ids or structured", "logits_processors"),
    **use("cut the prompt's token ids", "truncate_prompt_tokens"),
    **use("no spaces are put between tokens", "spaces_between_special_tokens", neutral=(True,)),
    **use("generate returns whole answers, and stream their new parts", "output_kind", neutral=()),
    **use("give them to the chat method", "chat_template_kwargs", "tools"),
    **use("give it to the chat method", "enable_thinking", neutral=()),  # false is what it is given for
    **use("use reasoning=ReasoningSection(start, end, max_tokens=...)", "thinking_token_budget", neutral=(-1,)),
    **use("use reasoning=ReasoningSection(start, end, max_tokens=...)", "thinking_budget", "reasoning_budget"),
    **use("use frequency_penalty or repetition_penalty", "repetition_detection", "no_repeat_ngram_size"),
    **use("use logprobs or prompt_logprobs, a number", "logprob_token_ids", "prompt_logprob_token_ids"),
    **use("prompt_logprobs are those of all tokens", "prompt_logprob_start", neutral=(0,)),
    **use("log-probabilities are mappings, one for each token", "flat_logprobs"),
    **use("requests with different salts of AsyncLLM share no pages", "skip_reading_prefix_cache"),
    **use("each token is sent at once", "stream_interval", neutral=(1,)),
    **use("there is no watermarking", "watermarking"),
    **use("it is not returned", "routed_experts_prompt_start", "trace_decode_token_ids", neutral=(0,)),
    **use("stop strings decide what is held back", "output_text_buffer_length", neutral=(0,)),
    **use("parameters never change, so they are not copied", "skip_clone", neutral=(False, True)),
    **use("it is for plugins of vLLM", "extra_args"),
}

STRUCTURED: Mapping[str, OtherName] = {
    **use("use json", "json_schema", "schema", "guided_json", "pydantic", neutral=()),  # {} demands some JSON
    **use("use regex", "pattern", "guided_regex"),
    **use("use choice", "choices", "guided_choice", "enum"),
    **use("use grammar", "ebnf", "gbnf", "lark", "guided_grammar"),
    **use("white space is always limited", "whitespace_pattern", "disable_any_whitespace"),
    **use("say it in the schema", "disable_additional_properties"),
    **use("there is one backend", "disable_fallback", "backend"),
}

_PROMPTS = {
    **use(NO_LORA, "lora_request", each=True),
    **use("there are no prompt adapters", "prompt_adapter_request"),
    **use("use structured of SamplingParams", "guided_options_request"),
    **use("encode the text with the LLM's tokenizer, and give token ids", "tokenization_kwargs"),
    **use("cut the prompt's token ids", "truncate_prompt_tokens"),
    **use(TEXT_ONLY, "mm_processor_kwargs", "multi_modal_data", "images"),
}

_CALLS = {
    **_PROMPTS,
    **same(params="sampling_params"),
    **use(
        "give it in sampling_params, a SamplingParams",
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "max_new_tokens"),
        *("stop", "stop_token_ids", "ignore_eos", "logit_bias", "bad_words", "allowed_token_ids", "structured"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
    ),
}

GENERATE: Mapping[str, OtherName] = {
    **_CALLS,
    **use("use AsyncLLM, whose streams have a priority", "priority", neutral=(0,), each=True),
}

CHAT: Mapping[str, OtherName] = {
    **GENERATE,
    **use("content is given to the template as text", "chat_template_content_format", neutral=("auto", "string")),
}

_NO_BAR = use("a stream has no progress bar", "use_tqdm", neutral=(False, True))

STREAM: Mapping[str, OtherName] = {**GENERATE, **_NO_BAR}

STREAM_CHAT: Mapping[str, OtherName] = {**CHAT, **_NO_BAR}

ASYNC_STREAM: Mapping[str, OtherName] = {
    **_CALLS,
    **_NO_BAR,
    **same(cache_salt="salt"),
    **use("give the prompt as a mapping with prompt and prompt_token_ids", "prompt_text"),
    **use("use the server, which reads the headers of requests", "trace_headers"),
    **use("requests go to the least loaded instance", "data_parallel_rank", "session_id", "kv_hints"),
    **use("use reasoning of SamplingParams", "reasoning_ended", "reasoning_parser_kwargs"),
}

EMBED: Mapping[str, OtherName] = {
    **_PROMPTS,
    **use("embeddings are normalised last hidden states", "pooling_params", "pooling_task"),
    **use("embeddings always have norm 1", "normalize", "normalize_embeddings", neutral=(True,)),
}

PROMPT: Mapping[str, OtherName] = {
    **use(
        TEXT_ONLY, "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs", "encoder_prompt"
    ),
    **use("use AsyncLLM, whose streams take a salt", "cache_salt"),
    **use("give prompts as text or token ids", "prompt_embeds"),
    **use("token ids are read as they are", "token_type_ids", "prompt_token_offsets", "prompt_is_token_ids"),
    **use("the keys say what it is", "type", neutral=("text", "token")),
}
