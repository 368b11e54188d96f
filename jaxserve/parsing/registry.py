"""The parsers by name, as in vLLM, and which of them a chat template needs."""

from collections.abc import Mapping
from typing import TypeVar

from jaxserve.core.errors import ConfigError
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.formats.deepseek import DeepSeekV3, DeepSeekV31, KimiK2
from jaxserve.parsing.formats.hermes import Hermes, InternLM
from jaxserve.parsing.formats.json_list import Granite, Jamba, Phi4Mini
from jaxserve.parsing.formats.llama3_json import Llama3Json
from jaxserve.parsing.formats.mistral import Mistral
from jaxserve.parsing.formats.pythonic import Llama4Pythonic, Olmo3, Pythonic
from jaxserve.parsing.formats.xml import Glm45, Glm47, MiniMaxM2, Qwen3Coder, SeedOss
from jaxserve.parsing.reasoning import ReasoningFormat

T = TypeVar("T")
Signs = tuple[tuple[str, tuple[str, ...]], ...]
AUTO, NONE = "auto", "none"
NO_TOOLS: Mapping[str, ToolFormat] = {}
NO_REASONING: Mapping[str, ReasoningFormat] = {}

FORMATS = (
    *(Hermes(), InternLM(), Granite(), Jamba(), Phi4Mini(), Llama3Json(), Mistral()),
    *(Pythonic(), Llama4Pythonic(), Olmo3(), DeepSeekV3(), DeepSeekV31(), KimiK2()),
    *(Qwen3Coder(), Glm45(), Glm47(), MiniMaxM2(), SeedOss()),
)
TOOL_PARSERS: Mapping[str, ToolFormat] = {
    **{form.name: form for form in FORMATS},
    "granite4": Hermes(),
    "hunyuan_a13b": Jamba(),
    "qwen3_xml": Qwen3Coder(),
}

# `always` is for models that only ever think, and whose chat templates do not all show the start tag in the prompt.
REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat("deepseek_r1", always=True),
        ReasoningFormat("deepseek_v3"),
        ReasoningFormat("deepseek_v31"),
        ReasoningFormat("glm45"),
        ReasoningFormat(
            "granite",
            start="Here is my thought process:",
            end="Here is my response:",
            other_starts=("Here's my thought process:",),
            other_ends=("Here's my response:",),
        ),
        ReasoningFormat("kimi_k2"),
        ReasoningFormat("minimax_m2", always=True),
        ReasoningFormat("mistral", start="[THINK]", end="[/THINK]"),
        ReasoningFormat("olmo3"),
        ReasoningFormat("qwen3"),
        ReasoningFormat("seed_oss", start="<seed:think>", end="</seed:think>"),
        ReasoningFormat("step3", always=True),
    )
}

# Which texts of a chat template show which parser, the first whose texts are all there. More special ones come first.
TOOL_SIGNS: Signs = (
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm47", ("<tool_call>", "<arg_key>", "</arg_key><arg_value>")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("phi4_mini_json", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("jamba", ("<tool_calls>", "</tool_calls>")),
    ("olmo3", ("<function_calls>",)),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"parameters": dictionary',)),
    ("llama3_json", ("<|python_tag|>",)),
)
REASONING_SIGNS: Signs = (
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("Here is my thought process:",)),
    ("deepseek_v31", ("<｜Assistant｜>", "thinking", "</think>")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("minimax_m2", ("]~b]ai", "<think>")),
    ("glm45", ("<|assistant|>", "<arg_key>", "</think>")),
    ("kimi_k2", ("<|im_middle|>", "</think>")),
    ("qwen3", ("</think>",)),
)


def tool_format(name: str, template: str = "", own: Mapping[str, ToolFormat] = NO_TOOLS) -> ToolFormat | None:
    """Return the format `name`, or for "auto" that of a chat template; None if it shows none, and for "none".

    Of a format with variants it is the one that the template shows. `own`: formats of the user by name; for "auto" it
    is the only one of them. Raise ConfigError for an unknown name, or if "auto" is one of several.
    """
    if name != AUTO or own:
        form = _named(name, TOOL_PARSERS, own, "tool")
    else:
        form = TOOL_PARSERS.get(_shown(TOOL_SIGNS, template))
    return form.for_template(template) if form else None


def reasoning_format(
    name: str, template: str = "", own: Mapping[str, ReasoningFormat] = NO_REASONING
) -> ReasoningFormat | None:
    """Return the format `name`, or for "auto" that of a chat template; None if it shows none, and for "none".

    `own` and the errors are as for `tool_format`.
    """
    if name != AUTO or own:
        return _named(name, REASONING_PARSERS, own, "reasoning")
    return REASONING_PARSERS.get(_shown(REASONING_SIGNS, template))


def _shown(signs: Signs, template: str) -> str:
    """Return the name of the parser that a chat template shows, "" if it shows none."""
    return next((name for name, texts in signs if all(text in template for text in texts)), "")


def _named(name: str, builtin: Mapping[str, T], own: Mapping[str, T], kind: str) -> T | None:
    if name == NONE:
        return None
    if name == AUTO:
        if len(own) > 1:
            raise ConfigError(f"the plugin has the {kind} parsers {', '.join(own)}: choose one (--{kind}-parser)")
        return next(iter(own.values()))
    known = {**builtin, **own}
    if name in known:
        return known[name]
    names = ", ".join([AUTO, NONE, *sorted(known)])
    raise ConfigError(f"unknown {kind} parser {name!r}: choose from {names} (--{kind}-parser)")
