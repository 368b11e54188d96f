"""The items of a response's output, made from the parts of an answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.parsing.events import Call, Part, Reasoning, Text
from jaxserve.server.schemas.response_items import new_item_id, seal
from jaxserve.server.schemas.response_tools import CUSTOM_ARGUMENT, ClientTool

Json = dict[str, Any]


@dataclass(frozen=True)
class Shown:
    """The details of an answer that a response shows besides its texts.

    `alternatives`: the number of likely tokens to list with the log-probability of each token, None for no
    log-probabilities. `sealed`: reasoning is returned as `encrypted_content`, too. `tools`: the client's tools by the
    names that the model knows.
    """

    alternatives: int | None = None
    sealed: bool = False
    tools: Mapping[str, ClientTool] = field(default_factory=dict)


@dataclass(eq=False)
class OutputItem:
    """A message, reasoning or a call, which grows while its answer is generated.

    `begun`, `done`: the numbers of its first event and of the first of its last events, None as long as there is none.
    """

    part: Part
    shown: Shown
    call_id: str = ""
    status: str = "in_progress"
    logprobs: list[Json] = field(default_factory=list)
    id: str = ""
    begun: int | None = None
    done: int | None = None

    def __post_init__(self) -> None:
        self.id = new_item_id(self.kind)

    @property
    def kind(self) -> str:
        """The type of the item."""
        match self.part:
            case Text():
                return "message"
            case Reasoning():
                return "reasoning"
            case Call():
                return "custom_tool_call" if self.is_custom else "function_call"

    @property
    def is_custom(self) -> bool:
        """True if the item is a call of a custom tool, which takes text."""
        return self.tool is not None and self.tool.custom

    @property
    def tool(self) -> ClientTool | None:
        """The tool that is called; None if the item is no call, or the model has made the tool up."""
        return self.shown.tools.get(self.part.name) if isinstance(self.part, Call) else None

    @property
    def called(self) -> Json:
        """The name of the tool that is called, as the client knows it."""
        if self.tool is None or self.tool.namespace is None:
            return {"name": self.part.name if isinstance(self.part, Call) else ""}
        return {"name": self.tool.name, "namespace": self.tool.namespace}

    def as_dict(self, *, empty: bool = False) -> Json:
        """Return the item as JSON; `empty`: as it was when it began."""
        base = {"id": self.id, "type": self.kind, "status": self.status}
        if isinstance(self.part, Call):
            name = "input" if self.is_custom else "arguments"
            argument = "" if empty else self.argument
            return {**base, "call_id": self.call_id, **self.called, name: argument}
        content = [] if empty else [self.content()]
        if isinstance(self.part, Text):
            return {**base, "role": "assistant", "content": content}
        sealed = {"encrypted_content": "" if empty else seal(self.part.text)} if self.shown.sealed else {}
        return {**base, "summary": [], "content": content, **sealed}

    def content(self, *, empty: bool = False) -> Json:
        """Return the only content part of a message or of reasoning; `empty`: as it was when it began."""
        assert not isinstance(self.part, Call)
        text = "" if empty else self.part.text
        if isinstance(self.part, Reasoning):
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if empty else [*self.logprobs]}

    @property
    def argument(self) -> str:
        """The input of a call for its tool: JSON, or the text for a custom tool."""
        assert isinstance(self.part, Call)
        return _custom_text(self.part.arguments) if self.is_custom else self.part.arguments


def _custom_text(arguments: str) -> str:
    """Return the text that a model wrote as the argument of a custom tool, or all that it wrote if it has no such."""
    try:
        return str(json.loads(arguments)[CUSTOM_ARGUMENT])
    except (ValueError, RecursionError, TypeError, KeyError):
        return arguments
