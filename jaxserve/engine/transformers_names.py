"""The keyword arguments and attributes of Transformers' tokenizers that have another name here, or none."""

from collections.abc import Mapping

from jaxserve.core.keywords import OtherName, same, use

UNSET = (False, "do_not_pad", "do_not_truncate")
LISTS = "lists of token ids are returned: make an array of them"
WHOLE = "texts of any length are encoded as they are: cut the token ids"

WHOLE_PROMPT = "apply_chat_template returns text or, with tokenize, its token ids"

_ENCODING: Mapping[str, OtherName] = {
    **use(LISTS, "return_tensors"),
    **use("texts are not padded", "padding", "pad_to_multiple_of", "padding_side", neutral=UNSET),
    **use(WHOLE, "truncation", "max_length", "stride", "truncation_side", neutral=(*UNSET, 0)),
    **use("encode one text at a time", "text_pair", "text_target", "text_pair_target", "is_split_into_words"),
    **use("use add_special_tokens", "add_bos_token", neutral=()),  # true or false, it may differ from the tokenizer's
    **use("use add_special_tokens", "add_eos_token"),
    **use("special tokens in a text are always read as such", "split_special_tokens"),
    **use(
        "input_ids and attention_mask are returned",
        *("return_token_type_ids", "return_overflowing_tokens", "return_special_tokens_mask"),
        *("return_offsets_mapping", "return_length"),
    ),
    **use("nothing is reported", "verbose", neutral=(False, True)),
}

ENCODE: Mapping[str, OtherName] = _ENCODING

CALL: Mapping[str, OtherName] = {
    **_ENCODING,
    **use("it is returned", "return_attention_mask", neutral=(True,)),
}

DECODE: Mapping[str, OtherName] = {
    **same(ids="token_ids"),
    **use("spaces are those of the tokens", "clean_up_tokenization_spaces", "spaces_between_special_tokens"),
}

CONVERSATION: Mapping[str, OtherName] = same(conversation="messages")

# Parameters of the chat methods, with which an unknown variable of a template is compared.
CHAT_PARAMETERS = (
    *("sampling_params", "use_tqdm", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "tools", "request_id", "priority", "salt"),
)

TEMPLATE: Mapping[str, OtherName] = {
    **use("the prompt of a request is always tokenized", "tokenize"),
    **use(WHOLE_PROMPT, "return_tensors"),
    **use(WHOLE_PROMPT, "return_dict", "padding", "truncation", "max_length", neutral=UNSET),
    **use(WHOLE_PROMPT, "return_assistant_tokens_mask", "tokenizer_kwargs"),
}

ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(("encode_plus", "batch_encode_plus", "prepare_for_model", "pad"), "call the tokenizer, or encode"),
    **dict.fromkeys(("vocab", "added_tokens_encoder", "get_added_vocab"), "use get_vocab"),
    **dict.fromkeys(("added_tokens_decoder", "extra_special_tokens"), "use special_tokens"),
    **dict.fromkeys(("additional_special_tokens", "all_special_tokens_extended"), "use all_special_tokens"),
    **dict.fromkeys(("additional_special_tokens_ids",), "use all_special_ids"),
    **dict.fromkeys(("add_tokens", "add_special_tokens", "resize_token_embeddings"), "the vocabulary is the model's"),
    **dict.fromkeys(("train_new_from_iterator", "set_truncation_and_padding"), "the vocabulary is the model's"),
    **dict.fromkeys(("model_max_length", "max_len_single_sentence"), "use max_model_len of the LLM"),
    **dict.fromkeys(("padding_side", "truncation_side", "model_input_names"), "texts are neither padded nor cut"),
    **dict.fromkeys(("name_or_path", "init_kwargs", "vocab_file"), "the folder is the LLM's option model or tokenizer"),
    **dict.fromkeys(("chat_template", "get_chat_template"), "use template_source"),
    **dict.fromkeys(("save_pretrained", "save_vocabulary", "push_to_hub"), "use save, which writes a tokenizer.json"),
    "from_pretrained": "use load",
    "backend_tokenizer": "use encode and decode, or tokenizers.Tokenizer.from_file",
    "convert_tokens_to_string": "use decode with token ids",
    "build_inputs_with_special_tokens": "use encode",
    "num_special_tokens_to_add": 'use the length of encode("")',
    "get_special_tokens_mask": "use special_ids",
    "parse_response": "use jaxserve.parsing",
    "is_fast": "it is the tokenizers library's",
}
