"""Keyword arguments that nobody reads: each is refused with the nearest name, and those of vLLM are understood."""

import inspect
import logging
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest

import jaxserve
from jaxserve import LLM, AsyncLLM, EngineConfig, ReasoningSection, RequestError, SamplingParams, StructuredOutput
from jaxserve.core import vllm_names, vllm_options
from jaxserve.core.errors import JaxserveError, UnknownKeyword
from jaxserve.core.keywords import OtherName, translate
from jaxserve.core.request import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.engine.prompts import as_prompt, as_prompts, chat_prompt

CLASSES = (EngineConfig, SamplingParams, StructuredOutput, ReasoningSection)
METHODS = (LLM.generate, LLM.stream, LLM.embed, AsyncLLM.stream, AsyncLLM.embed)
TABLES = {
    EngineConfig: vllm_options.ENGINE,
    SamplingParams: vllm_names.SAMPLING,
    StructuredOutput: vllm_names.STRUCTURED,
    LLM.generate: vllm_names.GENERATE,
    LLM.chat: vllm_names.CHAT,
    LLM.stream: vllm_names.STREAM,
    LLM.stream_chat: vllm_names.STREAM_CHAT,
    LLM.embed: vllm_names.EMBED,
    AsyncLLM.stream: vllm_names.ASYNC_STREAM,
    AsyncLLM.stream_chat: vllm_names.ASYNC_STREAM,
}


def keywords_of(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def message_of(function, *arguments, **keywords) -> str:
    with pytest.raises(UnknownKeyword) as refused:
        function(*arguments, **keywords)
    assert isinstance(refused.value, TypeError)  # as Python raises it
    assert isinstance(refused.value, JaxserveError)
    return str(refused.value)


@pytest.mark.parametrize("function", [*CLASSES, *METHODS], ids=lambda function: function.__qualname__)
def test_misspelt_keyword_is_refused_with_the_right_one(function) -> None:
    arguments = () if inspect.isclass(function) else (None,)  # refused before the object is looked at
    for name in keywords_of(function):
        misspelt = name[:-1] + "_" + name[-1] if len(name) > 3 else f"{name}s"
        message = message_of(function, *arguments, **{misspelt: 1})
        assert repr(misspelt) in message
        if len(name) > 3:
            assert f"did you mean {name!r}?" in message


@pytest.mark.parametrize("function", TABLES, ids=lambda function: function.__qualname__)
def test_keyword_of_vllm_is_another_name_or_explained(function) -> None:
    own = keywords_of(function)
    for name, other in TABLES[function].items():
        assert name not in own, "the table hides a keyword"
        assert (other.same in own) if other.same else other.reason
        if not other.same and not other.ignored:
            arguments = () if inspect.isclass(function) else (None,)
            assert other.reason in message_of(function, *arguments, **{name: object()})


def test_options_of_vllm_reach_the_engine_by_their_meaning(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="jaxserve"):
        config = EngineConfig(tensor_parallel_size=2, block_size=32, enable_prefix_caching=False, quantization=None)
        assert not caplog.records
        assert EngineConfig(trust_remote_code=True) == EngineConfig()
    assert "trust_remote_code has no effect" in caplog.text
    assert (config.tp, config.page_size, config.prefix_caching) == (2, 32, False)
    assert "memory_gb" in message_of(LLM, mem_fraction_static=0.9)
    assert "did you mean 'tensor_parallel_size', which is 'tp' here?" in message_of(LLM, tensor_paralel_size=2)
    assert "give one of them" in message_of(LLM, tp=2, tensor_parallel_size=2)
    assert "max_model_len" in message_of(AsyncLLM, max_model_length=9)


def test_sampling_parameters_of_vllm_are_taken_or_explained() -> None:
    demand = StructuredOutput(regex="a")
    assert SamplingParams(structured_outputs=demand).structured == demand
    assert SamplingParams(best_of=1, use_beam_search=False, logits_processors=None, extra_args={}) == SamplingParams()
    assert SamplingParams(logits_processors=[], thinking_token_budget=-1, structured_outputs=None) == SamplingParams()
    assert "reasoning=ReasoningSection(" in message_of(SamplingParams, thinking_token_budget=100)
    assert "structured=StructuredOutput(" in message_of(SamplingParams, guided_decoding=demand)
    assert "use max_tokens" in message_of(SamplingParams, max_new_tokens=4)
    assert "sampling_params" in message_of(LLM.generate, None, "a", temperature=0)
    assert "'jsn': did you mean 'json'?" in message_of(StructuredOutput, jsn={})


def test_only_neutral_values_of_the_same_type_are_neutral() -> None:
    table = {"a": OtherName(reason="no", neutral=(None, 1))}
    from jaxserve.core.keywords import translate

    assert translate("f", {"a": 1}, (), table) == translate("f", {"a": None}, (), table) == {}
    for value in (True, 0, "1", [1]):
        with pytest.raises(UnknownKeyword, match="no"):
            translate("f", {"a": value}, (), table)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (partial(LLM.embed, None, "a"), {"normalize": False}),
        (SamplingParams, {"enable_thinking": False}),
        (StructuredOutput, {"json_schema": {}}),
    ],
    ids=["embed", "sampling", "structured"],
)
def test_values_that_look_empty_but_ask_for_something_are_refused(function, given) -> None:
    assert next(iter(given)) in message_of(function, **given)


def test_keyword_that_resembles_one_of_another_engine_gets_its_advice() -> None:
    message = message_of(EngineConfig, tool_call_parser="hermes")
    assert message.endswith("did you mean 'tool_parser'? use jaxserve.parsing")


def test_signatures_stay_those_of_the_functions() -> None:
    assert keywords_of(SamplingParams) == [field.name for field in fields(SamplingParams)]
    assert keywords_of(LLM.generate) == ["prompts", "sampling_params", "use_tqdm", "prompt_token_ids"]


def test_key_of_a_prompt_that_nobody_reads_is_refused() -> None:
    assert "text only" in message_of(as_prompt, {"prompt": "a", "multi_modal_data": {"image": 1}})
    assert "'prompt_token_ids'" in message_of(as_prompt, {"prompt": "a", "prompt_token_id": [1]})
    assert as_prompt({"prompt": "a", "prompt_token_ids": None, "multi_modal_data": None}).text == "a"
    assert [prompt.token_ids for prompt in as_prompts([[1, 2], {"prompt_token_ids": [3]}])] == [(1, 2), (3,)]


class Table:
    """A table like those of pandas, which yield the names of their columns."""

    columns = ("prompt",)

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize("prompts", [{"a", "b"}, frozenset("a"), Table()])
def test_sets_and_tables_are_no_lists_of_prompts(prompts) -> None:
    with pytest.raises(RequestError, match="a set has no order, and of a table give one column"):
        as_prompts(prompts)


@pytest.mark.parametrize("tool", [len, {"name": "f"}, {"type": "function", "function": {}}, "f"])
def test_tool_of_another_form_is_refused(tool) -> None:
    with pytest.raises(RequestError, match=r"tools\.0 is .*must have the form"):
        chat_prompt(None, [{"role": "user", "content": "hi"}], None, {"tools": [tool]})


def test_generate_needs_one_kind_of_prompts() -> None:
    for given in ({}, {"prompts": "a", "prompt_token_ids": [1]}):
        with pytest.raises(RequestError, match="prompts or prompt_token_ids"):
            LLM.generate(None, **given)


@pytest.mark.parametrize(("kind", "name"), [(LLM, "score"), (LLM, "encode"), (AsyncLLM, "generate")])
def test_method_of_vllm_that_does_not_exist_says_what_to_use(kind, name) -> None:
    with pytest.raises(AttributeError, match=f"'{kind.__name__}' object has no attribute '{name}': use"):
        getattr(kind.__new__(kind), name)


def test_a_name_of_another_function_is_not_suggested_for_itself() -> None:
    with pytest.raises(UnknownKeyword) as caught:
        translate("stream_chat", {"use_tqdm": 1}, {"messages"}, {}, hints=("use_tqdm", "tools"))
    assert "did you mean 'use_tqdm'" not in str(caught.value)


@pytest.mark.parametrize("others", [vllm_names.STREAM, vllm_names.STREAM_CHAT, vllm_names.ASYNC_STREAM])
def test_streams_accept_and_explain_a_progress_bar(others) -> None:
    assert translate("stream", {"use_tqdm": True}, (), others) == {}
    with pytest.raises(UnknownKeyword, match="a stream has no progress bar"):
        translate("stream", {"use_tqdm": print}, (), others)


class Schema:
    """A class like those of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict:
        return {"type": "object"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": Schema()}, r"json must be a JSON schema, got .*Schema object at .*: give its class"),
        ({"json": list}, r"json must be a JSON schema, got <class 'list'>: wrap it in pydantic.TypeAdapter"),
        ({"json": list[int]}, r"json must be a JSON schema, got list\[int\]: wrap it in pydantic.TypeAdapter"),
        ({"json": 5}, "json must be a JSON schema, got 5$"),
        ({"choice": "yes"}, "choice must be a list of 1 to 10000 strings, got 'yes'"),
        ({"choice": []}, "choice must be a list of 1 to 10000 strings, got a list of 0"),
        ({"regex": 5}, "regex must be a non-empty string, got 5"),
        ({"grammar": "x" * 0}, "grammar must be a non-empty string, got ''"),
    ],
)
def test_wrong_structured_output_is_shown(given, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutput(**given)


def test_classes_and_adapters_of_pydantic_are_taken_as_their_schemas() -> None:
    adapter = SimpleNamespace(json_schema=lambda: {"type": "array"})
    assert StructuredOutput(json=Schema) == StructuredOutput(json={"type": "object"})
    assert StructuredOutput(json=adapter).text == '{"type": "array"}'


@pytest.mark.parametrize("given", ["x", {"start": "<a>"}, 5, True])
def test_reasoning_that_is_no_section_is_refused(given) -> None:
    with pytest.raises(RequestError, match=r"reasoning is .*: it must be a ReasoningSection"):
        SamplingParams(reasoning=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": 5, "end": "</a>"}, "which are texts"),
        ({"start": "<a>", "end": ""}, "needs a start and an end tag"),
        ({"start": "<a>", "end": "</a>", "max_tokens": "5"}, "max_tokens is '5': it must be an integer"),
        ({"start": "<a>", "end": "</a>", "max_tokens": True}, "max_tokens is True"),
        ({"start": "<a>", "end": "</a>", "max_tokens": -1}, "max_tokens is -1"),
    ],
)
def test_wrong_section_is_shown(given, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ReasoningSection(**given)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sampling_params": {"temperature": 0}}, "sampling_params is of type dict: it must be SamplingParams"),
        ({"sampling_params": 5}, "sampling_params is of type int"),
        ({"priority": "high"}, "priority is 'high': it must be an integer"),
        ({"priority": 1.5}, "priority is 1.5"),
        ({"priority": True}, "priority is True"),
        ({"salt": 5}, "salt is 5: it must be a text"),
        ({"request_id": 5}, "request_id is 5: it must be a text"),
    ],
)
def test_argument_of_a_stream_that_is_of_a_wrong_type_is_shown(keywords, message: str) -> None:
    llm = AsyncLLM.__new__(AsyncLLM)  # refused before an engine is needed
    with pytest.raises(RequestError, match=message):
        llm.stream([1], **keywords)
    if "sampling_params" in keywords:
        with pytest.raises(RequestError, match=message):
            LLM.__new__(LLM).stream([1], **keywords)


@pytest.mark.parametrize(
    "owner", [jaxserve, LLM, AsyncLLM, SamplingParams, RequestOutput, CompletionOutput, RequestMetrics]
)
def test_type_checkers_see_which_attributes_there_are(owner):
    """They let every name of a class or module pass that has a function `__getattr__` which they see."""
    assert hasattr(owner, "__getattr__")
    seen = inspect.getsource(owner).partition("if not TYPE_CHECKING:")[0]
    assert "def __getattr__" not in seen
