"""The parsers by name, as in vLLM, and which of them a chat template needs."""

from collections.abc import Mapping

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

AUTO, NONE = "auto", "none"

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
            starts=("Here's my thought process:",),
            ends=("Here's my response:",),
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
TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
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
REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
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


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format of tool calls by the parser's name, in the variant that the chat template shows.

    "auto": the format that the template shows, None if it shows none. "none": None. Raise `ConfigError` for a name that
    is not known.
    """
    name = _name(name, TOOL_PARSERS, TOOL_SIGNS, template, "tool_parser")
    return TOOL_PARSERS[name].for_template(template) if name else None


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of reasoning by the parser's name, with "auto" and "none" as in `tool_format`."""
    name = _name(name, REASONING_PARSERS, REASONING_SIGNS, template, "reasoning_parser")
    return REASONING_PARSERS[name] if name else None


def _name(
    name: str,
    known: Mapping[str, object],
    signs: tuple[tuple[str, tuple[str, ...]], ...],
    template: str,
    option: str,
) -> str:
    """Return the name of a parser, "" if there is to be none."""
    if name == NONE:
        return ""
    if name == AUTO:
        return next((each for each, texts in signs if all(text in template for text in texts)), "")
    if name not in known:
        raise ConfigError(f"{option} is {name!r}, it can be {AUTO}, {NONE}, {', '.join(sorted(known))}")
    return name
