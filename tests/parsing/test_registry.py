"""Parsers are found by the names that vLLM gives them, or by what a chat template shows."""

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.parsing.formats.mistral import Mistral, NewerMistral, SpacedMistral
from jaxserve.parsing.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_format, tool_format

# What is particular to the chat templates of each family.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
HERMES = CHATML + (
    "return a json object within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    "{% for c in m.tool_calls %}<tool_call>\n{{ c }}\n</tool_call>{% endfor %}"
)
QWEN3 = HERMES + (
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
QWEN3_CODER = CHATML + (
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA3 = (
    "<|start_header_id|>{{ role }}<|end_header_id|>{{- '<|python_tag|>' + name }}"
    "{{- 'Respond in the format "
    """{"name": function name, "parameters": dictionary of argument name and its value}. ' }}"""
)
LLAMA32_PYTHONIC = (
    "<|start_header_id|>{{ role }}<|end_header_id|>"
    "{{- 'Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...)]' }}"
)
LLAMA4 = "<|header_start|>{{ role }}<|header_end|>Use exact format: [func_name1(param1=value1), func_name2(...)]"
MISTRAL3 = "[INST]{{ content }}[/INST]{{- '[TOOL_CALLS][' }}{{ calls | tojson }}{{ ']' + eos_token }}"
MISTRAL3_SPACED = "[INST] {{ content }}[/INST]{{- '[TOOL_CALLS] [' }}{{ calls | tojson }}{{ ']' + eos_token }}"
MISTRAL11 = "[INST]{{ content }}[/INST]{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}"
MAGISTRAL = MISTRAL11 + "{{- '[THINK]' + block.thinking + '[/THINK]' }}"
DEEPSEEK_R1 = (
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json' }}"
    "{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜><think>\\n' }}"
)
DEEPSEEK_V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<｜Assistant｜>' }}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>' }}"
    "{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}"
)
GLM45 = (
    "[gMASK]<sop><|assistant|><tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "</tool_call>{% if not enable_thinking %}<think></think>{% endif %}"
)
GLM47 = GLM45.replace("\n", "")
KIMI = (
    "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>{{ id }}"
    "<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="{{ name }}"></invoke></minimax:tool_call></think>{{ "]~b]ai\\n<think>\\n" }}'
)
SEED = "<seed:think>{{ reasoning }}</seed:think><seed:tool_call>\n<function=f>\n<parameter=a>v</parameter>\n</function>"
GRANITE = (
    "<|start_of_role|>{{ role }}<|end_of_role|>write <|tool_call|> followed by a JSON list of tools used."
    " Write 'Here is my thought process:' before your thoughts and 'Here is my response:' before your response."
)
INTERNLM = "<|im_start|>assistant\n<|action_start|><|plugin|>\n{{ call }}<|action_end|><|im_end|>"
PHI4 = '<|system|>functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]<|end|>'
JAMBA = "<|bom|><|assistant|><tool_calls>[{{ calls }}]</tool_calls><|eom|>"
OLMO3 = "<|im_start|>system\nrespond with:\n<function_calls>\nget_weather(city='New York')\n</function_calls>"

SHOWN = [
    (CHATML, None, None),
    ("", None, None),
    (HERMES, "hermes", None),
    (QWEN3, "hermes", "qwen3"),
    (QWEN3_CODER, "qwen3_coder", None),
    (LLAMA3, "llama3_json", None),
    (LLAMA32_PYTHONIC, "pythonic", None),
    (LLAMA4, "llama4_pythonic", None),
    (MISTRAL3, "mistral", None),
    (MISTRAL11, "mistral", None),
    (MAGISTRAL, "mistral", "mistral"),
    (DEEPSEEK_R1, "deepseek_v3", "deepseek_r1"),
    (DEEPSEEK_V31, "deepseek_v31", "deepseek_v31"),
    (GLM45, "glm45", "glm45"),
    (GLM47, "glm47", "glm45"),
    (KIMI, "kimi_k2", None),
    (KIMI + "<think></think>", "kimi_k2", "kimi_k2"),
    (MINIMAX, "minimax_m2", "minimax_m2"),
    (SEED, "seed_oss", "seed_oss"),
    (GRANITE, "granite", "granite"),
    (INTERNLM, "internlm", None),
    (PHI4, "phi4_mini_json", None),
    (JAMBA, "jamba", None),
    (OLMO3, "olmo3", None),
    (OLMO3 + "<think>", "olmo3", None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), SHOWN)
def test_auto_is_what_the_template_shows(template: str, tools: str | None, reasoning: str | None) -> None:
    form, thoughts = tool_format("auto", template), reasoning_format("auto", template)
    assert (form and form.name) == tools
    assert (thoughts and thoughts.name) == reasoning


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_tool_parsers_have_names(name: str) -> None:
    form = tool_format(name, CHATML)
    assert form is not None
    assert isinstance(form, type(TOOL_PARSERS[name]))


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_reasoning_parsers_have_names(name: str) -> None:
    assert reasoning_format(name, HERMES) == REASONING_PARSERS[name]


def test_none_is_no_parser() -> None:
    assert tool_format("none", HERMES) is None
    assert reasoning_format("none", QWEN3) is None


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'qwen4'.*auto, none, .*hermes.*qwen3_coder"):
        tool_format("qwen4", HERMES)
    with pytest.raises(ConfigError, match=r"'qwen4'.*auto, none, .*deepseek_r1.*qwen3"):
        reasoning_format("qwen4", HERMES)


@pytest.mark.parametrize(
    ("template", "kind"), [(MISTRAL3, Mistral), (MISTRAL3_SPACED, SpacedMistral), (MISTRAL11, NewerMistral)]
)
def test_the_template_shows_which_calls_a_model_of_mistral_writes(template: str, kind: type[Mistral]) -> None:
    assert type(tool_format("mistral", template)) is kind


def test_ids_of_calls_are_new_each_time_and_of_the_kind_that_templates_accept() -> None:
    ids = {name: [TOOL_PARSERS[name].new_call_id("f", index) for index in range(3)] for name in TOOL_PARSERS}
    assert all(len(set(three)) == 3 for three in ids.values())
    assert all(len(each) == 9 and each.isalnum() for each in ids["mistral"])
    assert ids["kimi_k2"] == ["functions.f:0", "functions.f:1", "functions.f:2"]
    assert all(each.startswith("call_") and len(each) == 29 for each in ids["hermes"])
