"""The formats of a model's answers: how reasoning and tool calls are found in them, and how calls are enforced."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.structured import Fallback, Refusals, StructuredOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.formats.hermes import Hermes
from jaxserve.parsing.grammar import tool_grammar
from jaxserve.parsing.lark import one_of
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.registry import NONE
from jaxserve.parsing.schemas import json_rule, object_schema
from jaxserve.parsing.tools import Tool, ToolUse
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.settings import ServerSettings


@dataclass(frozen=True)
class AnswerFormats:
    """The formats of one model and server. None: there is no tool calling, or no reasoning, or it stays in the text."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    special_tokens: Mapping[str, int]  # ids by text
    tools_hint: str  # why there is no tool calling

    @classmethod
    def of(cls, settings: ServerSettings, tokenizer: Tokenizer) -> "AnswerFormats":
        """Return the formats that the settings name or the chat template shows."""
        template = tokenizer.template_source
        tools = settings.tool_format(template)
        if tools is None and settings.tool_parser != NONE and not tokenizer.template_knows_tools:
            tools = Hermes()  # the format in which tools are added to messages
        hint = "this server runs with --tool-parser none"
        if settings.tool_parser != NONE:
            hint = "its chat template does not show how the model writes calls (--tool-parser)"
        return cls(tools, settings.reasoning_format(template), tokenizer.special_tokens, hint)

    def capabilities(self, tokenizer: Tokenizer) -> list[str]:
        """Return what a model with this tokenizer can do, for clients that adapt to it.

        - "text": takes and returns text
        - "chat": has a chat template of its own or from --chat-template; otherwise the built-in one is used
        - "tools": its calls of tools are found; "reasoning": so is its reasoning
        - "thinking": its template reads `enable_thinking`
        """
        found = {
            "text": True,
            "chat": tokenizer.has_chat_template,
            "tools": tokenizer.has_chat_template and self.tools is not None,
            "reasoning": self.reasoning is not None,
            "thinking": "enable_thinking" in tokenizer.template_variables,
        }
        return [name for name, present in found.items() if present]

    def answer_format(self, body: ChatBody, prompt: str) -> AnswerFormat:
        """Return the format of answers to a conversation, which has been rendered as `prompt`.

        Raise RequestError if the request's tools are not valid or cannot be called.
        """
        use = body.tool_use()
        if use is not None and self.tools is None:
            raise UnsupportedParameter(f"tools cannot be used: {self.tools_hint}", field="tools")
        section = None
        if self.reasoning is not None:
            opening = body.opening()
            section = self.reasoning.after(prompt) if opening is None else self.reasoning.inside(opening)
        calls = sum(len(message.tool_calls or ()) for message in body.messages)
        return AnswerFormat(section, self.tools if use else None, use, calls_before=calls)

    def structured(self, form: AnswerFormat, asked: StructuredOutput | None) -> StructuredOutput | None:
        """Return what the answer must be so that its calls are valid and its text is what the client `asked` for.

        Raise RequestError if both cannot be demanded together.
        """
        use = form.tool_use
        if use is None or form.tool_format is None or not (use.constrained or asked):
            return asked
        parts = tuple(_schema(tool) for tool in use.tools if tool.strict)
        text = ""
        if asked is not None and not use.required:
            text, parts = _rule(asked), (*parts, asked)

        grammars = _ToolGrammars(form.tool_format, self.special_tokens, text, parts)
        return grammars.demanded(use, lambda refusals: grammars.loosened(use, refusals))

    def reasoning_section(self, form: AnswerFormat, budget: int | None) -> ReasoningSection | None:
        """Return the reasoning for the engine. Raise RequestError for a budget if the model has no reasoning."""
        if budget is not None and self.reasoning is None:
            raise UnsupportedParameter(
                "thinking_token_budget needs a model whose reasoning is parsed (--reasoning-parser)",
                field="thinking_token_budget",
                value=budget,
            )
        return None if form.section is None else replace(form.section, max_tokens=budget)

    def shows_special_tokens(self, form: AnswerFormat) -> bool:
        """Return whether the parser must see tokens that are left out of text otherwise."""
        tags = () if form.section is None else (*form.section.starts, *form.section.ends)
        markers = () if form.tool_format is None else form.tool_format.markers
        return any(text in self.special_tokens for text in (*tags, *markers))


@dataclass(frozen=True)
class _ToolGrammars:
    """The grammars of one request's tools. `text`: the rule for answers without calls, "" for any text."""

    form: ToolFormat
    special_tokens: Mapping[str, int]
    text: str
    parts: Sequence[StructuredOutput]

    def demanded(self, use: ToolUse, fallback: Fallback | None = None, loose: Sequence[str] = ()) -> StructuredOutput:
        """Return the demand on answers that use tools. `loose`: the places of schemas that have been left out."""
        grammar = tool_grammar(self.form, use, self.special_tokens, self.text)
        dropped = [f"{tool.place}{place[1:]}" for tool in use.tools for place in tool.dropped]
        return StructuredOutput(
            grammar=grammar, strict=True, place="tools", parts=self.parts, fallback=fallback, dropped=[*dropped, *loose]
        )

    def loosened(self, use: ToolUse, refusals: Refusals) -> StructuredOutput:
        """Return the demand without the schemas that cannot be held, and if that does not suffice without any.

        Those of strict tools stay.
        """
        alone = [self.demanded(ToolUse((tool,), required=True)) for tool in use.tools]
        reasons = refusals(alone)
        faulty = [bool(reason) for reason in reasons]
        last = self._without(use, [True] * len(reasons), reasons)
        some = any(found and not tool.strict for found, tool in zip(faulty, use.tools, strict=True))
        return self._without(use, faulty, reasons, lambda _: last) if some else last

    def _without(
        self, use: ToolUse, left_out: Sequence[bool], reasons: Sequence[str], fallback: Fallback | None = None
    ) -> StructuredOutput:
        """Return the demand without some of the schemas that are not strict."""
        tools, loose = list(use.tools), []
        for index, tool in enumerate(use.tools):
            if left_out[index] and not tool.strict:
                tools[index] = replace(tool, parameters={})
                loose.append(f"{tool.place} ({reasons[index] or 'all schemas together cannot be held'})")
        return self.demanded(replace(use, tools=tuple(tools)), fallback, loose)


def _schema(tool: Tool) -> StructuredOutput:
    return StructuredOutput(json=object_schema(tool), strict=True, place=tool.place)


def _rule(asked: StructuredOutput) -> str:
    """Return a rule of Lark for the text that a client asked for beside tools."""
    match asked.kind:
        case "json" | "json_object":
            schema = json.loads(asked.text) if asked.kind == "json" else {"type": "object"}
            if not isinstance(schema, bool | dict):
                raise RequestError(f"{asked.name} must be a JSON schema", field=asked.name)
            return json_rule({} if schema is True else schema, asked.strict)
        case "choice":
            return one_of(asked.choice or ())
    raise RequestError(
        f"{asked.name} cannot be given together with tools: give a JSON schema, or tool_choice none", field=asked.name
    )
