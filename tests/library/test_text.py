"""Text in and out, on the bundled model: stop strings, bad words, conversations, streams."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import LLM, RequestError, SamplingParams

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


@pytest.mark.parametrize("messages", ["hi", None, 3, {"role": "user", "content": "hi"}, ["hi"], [["hi"]]])
def test_messages_that_are_no_list_of_objects_are_a_request_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="it must be a"):
        llm.chat(messages, use_tqdm=False)


def test_end_of_text_ends_an_answer_unless_ignored(llm: LLM) -> None:
    end = llm.tokenizer.eos_token_ids[0]
    forced = {"logit_bias": {end: 100.0}}
    stopped = answer(llm, **forced)
    assert (stopped.finish_reason, stopped.text, stopped.token_ids) == ("stop", "", (end,))
    assert len(answer(llm, **forced, ignore_eos=True).token_ids) == 40
    assert len(answer(llm, **forced, min_tokens=7).token_ids) == 8
