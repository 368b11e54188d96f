"""The parsers by name, as in vLLM, and which of them a chat template needs."""

from collections.abc import Mapping

from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.formats.hermes import Hermes
from jaxserve.parsing.reasoning import ReasoningFormat

AUTO, NONE = "auto", "none"

TOOL_PARSERS: Mapping[str, ToolFormat] = {form.name: form for form in (Hermes(),)}

REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
    )
}
