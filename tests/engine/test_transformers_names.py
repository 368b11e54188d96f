"""What users of Transformers' tokenizers try: it works, or an error names the right way."""

import numpy as np
import pytest

from jaxserve.core.errors import RequestError, UnknownKeyword
from jaxserve.engine import transformers_names
from jaxserve.engine.tokenizer import Tokenizer
from tests.engine.constructions import byte_level

SPECIAL = {"eos_token": "</s>", "bos_token": "<s>"}
TOKENIZER = Tokenizer(byte_level(), special_tokens=SPECIAL)
EOS = TOKENIZER.token_id("</s>")
MESSAGES = [{"role": "user", "content": "hi"}]


def test_attributes_of_special_tokens() -> None:
    assert (TOKENIZER.eos_token, TOKENIZER.eos_token_id, TOKENIZER.bos_token) == ("</s>", EOS, "<s>")
    assert TOKENIZER.pad_token is TOKENIZER.pad_token_id is TOKENIZER.unk_token_id is None
    assert TOKENIZER.special_tokens_map == SPECIAL
    assert {TOKENIZER.token(token) for token in TOKENIZER.all_special_ids} == set(TOKENIZER.all_special_tokens)
    assert {"<s>", "</s>"} <= set(TOKENIZER.all_special_tokens)
    assert TOKENIZER.all_special_ids == sorted(TOKENIZER.special_ids)


def test_conversions_of_tokens() -> None:
    ids = TOKENIZER.encode("the fox")
    tokens = TOKENIZER.tokenize("the fox")
    assert TOKENIZER.convert_ids_to_tokens(ids) == tokens
    assert TOKENIZER.convert_tokens_to_ids(tokens) == ids
    assert TOKENIZER.convert_ids_to_tokens(ids[0]) == tokens[0]
    assert TOKENIZER.convert_tokens_to_ids(tokens[0]) == TOKENIZER.get_vocab()[tokens[0]] == ids[0]
    assert TOKENIZER.convert_tokens_to_ids("no such token") is None
    assert TOKENIZER.convert_ids_to_tokens([ids[0], EOS, 10**6], skip_special_tokens=True) == [tokens[0], None]
    assert len(TOKENIZER) == TOKENIZER.vocab_size == len(TOKENIZER.get_vocab())


def test_call_returns_ids_and_mask() -> None:
    ids = TOKENIZER.encode("the fox")
    assert TOKENIZER("the fox") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert TOKENIZER(["the fox", "a"], padding=False, truncation=False).input_ids[0] == ids
    with pytest.raises(AttributeError, match="input_ids and attention_mask, not 'offset_mapping'"):
        TOKENIZER("a").offset_mapping  # noqa: B018


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_decoding_takes_any_series_of_ids(form) -> None:
    ids = TOKENIZER.encode("the fox")
    assert TOKENIZER.decode(form(ids)) == "the fox"
    assert TOKENIZER.batch_decode(form([ids, ids])) == ["the fox"] * 2
    assert TOKENIZER.decode(form(ids)[0]) == TOKENIZER.token(ids[0])
    assert TOKENIZER.decode([*ids, len(TOKENIZER), 2**40], clean_up_tokenization_spaces=False) == "the fox"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [([-1], "has -1: token ids"), (-1, "has -1"), ("ab", "is 'ab'"), ([1.5], r"\[1.5\]"), (None, "None"), ([[1]], "1")],
)
def test_what_is_no_token_id_is_refused(wrong, message) -> None:
    with pytest.raises(RequestError, match=message):
        TOKENIZER.decode(wrong)


@pytest.mark.parametrize("name", transformers_names.ATTRIBUTES)
def test_attribute_that_does_not_exist_says_what_to_use(name) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(Tokenizer.__new__(Tokenizer), name)
    assert transformers_names.ATTRIBUTES[name] in str(refused.value)


CALLS = {
    "encode": (TOKENIZER.encode, "a", transformers_names.ENCODE),
    "call": (TOKENIZER, "a", transformers_names.CALL),
    "decode": (TOKENIZER.decode, [5], transformers_names.DECODE),
    "template": (TOKENIZER.conversation_text, MESSAGES, transformers_names.TEMPLATE),
}


def test_begin_of_a_sequence_is_not_left_out_by_a_switch_that_is_not_read() -> None:
    with pytest.raises(UnknownKeyword, match="use add_special_tokens"):
        TOKENIZER("a", add_bos_token=False)


@pytest.mark.parametrize("call", CALLS)
def test_keyword_is_neutral_or_explained(call) -> None:
    function, argument, table = CALLS[call]
    for name, other in table.items():
        if other.same:
            continue
        for neutral in other.neutral:
            assert function(argument, **{name: neutral}) == function(argument)
        with pytest.raises(UnknownKeyword) as refused:
            function(argument, **{name: object()})
        assert other.reason in str(refused.value)
    with pytest.raises(UnknownKeyword, match="does not take 'add_speical_tokens'"):
        function(argument, add_speical_tokens=True)


def test_conversation_is_another_name_of_messages() -> None:
    assert TOKENIZER.apply_chat_template(conversation=MESSAGES, tokenize=False) == "User: hi\nAssistant:"


def test_conversation_is_tokenized_if_asked() -> None:
    ids = TOKENIZER.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)
    assert ids == TOKENIZER.encode("User: hi\nAssistant:", add_special_tokens=False)


def test_representation_names_the_vocabulary_and_the_template() -> None:
    assert repr(TOKENIZER) == (
        f"<Tokenizer, tokens: {len(TOKENIZER):,}, bos_token '<s>', eos_token '</s>', "
        "chat template: the built-in 'plain'>"
    )
