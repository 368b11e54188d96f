"""Text in and out, on the bundled model: stop strings, bad words, conversations, streams."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import LLM, RequestError, SamplingParams
from jaxserve.core.errors import UnknownKeyword

PROMPT = "def main():"
GREEDY = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(warmup=False, max_num_seqs=4, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """The text of the model without stop strings."""
    return answer(llm).text


def answer(llm: LLM, **params):
    (output,) = llm.generate([PROMPT], SamplingParams(**(GREEDY | params)), use_tqdm=False)
    return output.outputs[0]


def test_answer_text_is_its_decoded_tokens(llm: LLM, text: str) -> None:
    assert text.strip()
    assert text == llm.tokenizer.decode(answer(llm).token_ids)
    assert answer(llm, detokenize=False).text == ""


def test_character_that_is_cut_or_begun_is_shown_alike_whole_and_streamed(llm: LLM) -> None:
    *begun, last = llm.tokenizer.encode("x = '\U0001f9e0")
    cases = [
        (begun[:-1], begun[-1], "\ufffd"),  # the answer is cut inside a character
        (begun, last, "\U0001f9e0"),  # the prompt is, and the answer completes it
        (begun, llm.tokenizer.encode("a")[-1], "a"),  # or does not
    ]
    for prompt, token, expected in cases:
        params = SamplingParams(max_tokens=1, allowed_token_ids=[token], ignore_eos=True, logprobs=0)
        (output,) = llm.generate(prompt_token_ids=prompt, sampling_params=params, use_tqdm=False)
        pieces = list(llm.stream({"prompt_token_ids": prompt}, params))
        assert output.outputs[0].text == "".join(piece.outputs[0].text for piece in pieces) == expected
        assert output.outputs[0].token_ids == (token,)
    assert llm.tokenizer.decode([*begun, last]) == "x = '\U0001f9e0"
    assert llm.tokenizer.decode(begun).endswith("\ufffd")


def test_prompt_may_be_text_tokens_or_a_mapping(llm: LLM, text: str) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    prompts = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}]
    outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [text] * 4
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"text": PROMPT})


def test_stop_string_ends_the_text_before_it(llm: LLM, text: str) -> None:
    stop = text[len(text) // 2 : len(text) // 2 + 5]  # crosses tokens
    cut = answer(llm, stop=[stop, "never said"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[: text.index(stop)], "stop", stop)
    kept = answer(llm, stop=stop, include_stop_str_in_output=True)
    assert kept.text == text[: text.index(stop)] + stop


def test_stream_never_shows_part_of_a_stop_string(llm: LLM, text: str) -> None:
    stop = text[10:16]
    pieces = [o.outputs[0].text for o in llm.stream(PROMPT, SamplingParams(**GREEDY, stop=stop))]
    assert "".join(pieces) == text[: text.index(stop)]


def test_unfinished_stop_string_is_shown_at_the_end(llm: LLM, text: str) -> None:
    assert answer(llm, stop=text[-3:] + "\x00").text == text


def test_bad_words_are_avoided(llm: LLM, text: str) -> None:
    word = max(text.split(), key=len)
    other = answer(llm, bad_words=[word]).text
    assert word not in other
    assert other.strip()


def test_chat_follows_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "import os"}]
    (output,) = llm.chat(messages, SamplingParams(**GREEDY), use_tqdm=False)
    template = llm.tokenizer.apply_chat_template(messages)
    assert list(output.prompt_token_ids) == llm.tokenizer.encode(template, add_special_tokens=False)
    streamed = "".join(o.outputs[0].text for o in llm.stream_chat(messages, SamplingParams(**GREEDY)))
    assert streamed == output.outputs[0].text
    both = llm.chat([messages, messages], SamplingParams(**GREEDY), use_tqdm=False)
    assert [o.outputs[0].text for o in both] == [streamed, streamed]


def test_keywords_of_vllm_mean_the_same(llm: LLM, text: str) -> None:
    params = SamplingParams(**GREEDY)
    ids = llm.get_tokenizer().encode(PROMPT)
    calls = [
        {"prompts": [PROMPT, PROMPT], "sampling_params": [params, SamplingParams(temperature=0, max_tokens=2)]},
        {"prompts": {"prompt": PROMPT}, "sampling_params": params, "lora_request": None},
        {"prompt_token_ids": [ids], "sampling_params": params},
        {"prompts": PROMPT, "params": params},
    ]
    for call in calls:
        first, *others = llm.generate(**call, use_tqdm=False)
        (only,) = first.outputs
        assert (only.text, only.finish_reason, len(only.token_ids)) == (text, "length", 40)
        assert (first.prompt_token_ids, first.finished) == (tuple(ids), True)
        assert all(len(other.outputs[0].token_ids) == 2 for other in others)


def test_chat_reads_every_keyword(llm: LLM) -> None:
    messages = [{"role": "user", "content": "import os"}]
    params = SamplingParams(**GREEDY)
    (expected,) = llm.chat(messages, params, use_tqdm=False)
    (output,) = llm.chat(messages, sampling_params=params, use_tqdm=False, chat_template_kwargs={}, tools=None)
    assert output.outputs[0].text == expected.outputs[0].text
    template = "{{ greeting }} {{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    for given, prompt in [
        ({"greeting": "a"}, "a import os!"),
        ({"chat_template_kwargs": {"greeting": "b"}, "greeting": "a"}, "b import os!"),
        ({"add_generation_prompt": False}, " import os"),
        ({"add_generation_prompt": False, "continue_final_message": True}, " import os"),
    ]:
        (output,) = llm.chat(messages, params, False, chat_template=template, **given)
        streamed = list(llm.stream_chat(messages, params, chat_template=template, **given))
        assert output.prompt == streamed[0].prompt == prompt
    for wrong, message in [
        ({"chat_template_kwargs": {"greting": "a"}}, "'greting': did you mean 'greeting'"),
        ({"greting": "a"}, "'greting': did you mean 'greeting'"),
        ({"samplng_params": params}, "did you mean 'sampling_params'"),
        ({"temperature": 0}, "sampling_params"),
        ({"lora_request": 1}, "LoRA"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ]:
        for method in (llm.chat, llm.stream_chat):
            with pytest.raises(UnknownKeyword, match=message):
                method(messages, chat_template=template, **wrong)
    with pytest.raises(UnknownKeyword, match="'enable_thinking'"):
        llm.chat(messages, enable_thinking=False)  # this model's template does not read it
    with pytest.raises(UnknownKeyword, match="'enable_thinking'"):
        llm.tokenizer.apply_chat_template(messages, enable_thinking=False)
    with pytest.raises(RequestError, match="sampling_params is of type dict"):
        llm.chat(messages, {"temperature": 0})


@pytest.mark.parametrize("messages", ["hi", None, 3, {"role": "user", "content": "hi"}, ["hi"], [["hi"]], [[]]])
def test_messages_that_are_no_list_of_objects_are_a_request_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="it must be a"):
        llm.chat(messages, use_tqdm=False)
    if messages != [[]] and messages != [["hi"]]:
        with pytest.raises(RequestError, match="it must be a"):
            llm.stream_chat(messages)


def test_end_of_text_ends_an_answer_unless_ignored(llm: LLM) -> None:
    end = llm.tokenizer.eos_token_ids[0]
    forced = {"logit_bias": {end: 100.0}}
    stopped = answer(llm, **forced)
    assert (stopped.finish_reason, stopped.text, stopped.token_ids) == ("stop", "", (end,))
    assert len(answer(llm, **forced, ignore_eos=True).token_ids) == 40
    assert len(answer(llm, **forced, min_tokens=7).token_ids) == 8


@pytest.mark.parametrize(
    ("keywords", "field"),
    [({"chat_template_kwargs": 5}, "chat_template_kwargs"), ({"tools": 5}, "tools"), ({"tools": "f"}, "tools")],
)
def test_arguments_of_a_wrong_type_are_named(llm: LLM, keywords: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"{field}.* must be a") as caught:
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False, **keywords)
    assert caught.value.field == field
