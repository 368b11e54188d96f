"""The limits on fields of requests, each with a body that has n of something, for every endpoint that has the limit."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxserve.core.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKENS, MAX_STRING
from jaxserve.core.structured import MAX_CHOICES, MAX_GRAMMAR
from jaxserve.server.schemas.common import MAX_PRIORITY, MAX_SALT, MIN_PRIORITY
from jaxserve.server.schemas.tools import MAX_TOOL_NAME, MAX_TOOLS

WINDOW, PROMPTS, VOCABULARY = 120, 5, 1000
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
SAMPLED = (COMPLETIONS, CHAT, RESPONSES)
GENERATED = (*SAMPLED, MESSAGES)
EMBEDDED = (EMBEDDINGS, SCORE, RERANK)

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
# A body that each endpoint accepts.
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHAT: HELLO | {"max_tokens": 1},
    RESPONSES: {"input": "hi"},
    MESSAGES: HELLO | {"max_tokens": 1},
    EMBEDDINGS: {"input": "a"},
    SCORE: {"text_1": "a", "text_2": "b"},
    RERANK: {"query": "a", "documents": ["b"]},
}
Make = Callable[[int], Any]


class Limit(NamedTuple):
    """A limit: the largest n that is accepted (with `step` -1 the smallest), and the fields that n gives, by endpoint.

    A refusal names the field, the value, the limit and the `option` that changes it, if there is one. `documented`: the
    limit with default options, if the test's server has others. `relative`: the limit follows from the model or from
    other fields. `small`: for the server whose model has a small context.
    """

    limit: int
    fields: Mapping[str, Make]
    option: str = ""
    step: int = 1
    documented: int | None = None
    relative: bool = False
    small: bool = False

    @property
    def beyond(self) -> int:
        """The first value that is refused."""
        return self.limit + self.step


def at(paths: Iterable[str], **fields: Make) -> dict[str, Make]:
    """Return the same fields, of which each is made of n, for several endpoints."""
    return dict.fromkeys(paths, lambda n: {name: make(n) for name, make in fields.items()})


def value(n: int) -> int:
    return n


def entries(entry: Any) -> Make:
    return lambda n: [entry] * n


def schema(n: int) -> dict[str, Any]:
    """Return a JSON schema of n characters."""
    return {"description": "a" * (n - len('{"description": ""}'))}


def tools(path: str, names: Iterable[str]) -> list[dict[str, Any]]:
    if path == MESSAGES:
        return [{"name": name, "input_schema": {"type": "object"}} for name in names]
    if path == RESPONSES:
        return [{"type": "function", "name": name} for name in names]
    return [{"type": "function", "function": {"name": name}} for name in names]


def tools_of(names: Callable[[int], Iterable[str]]) -> dict[str, Make]:
    return {path: lambda n, path=path: {"tools": tools(path, names(n))} for path in (CHAT, RESPONSES, MESSAGES)}


def chat_schema(n: int) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(n)}}}


def repeated(n: int) -> dict[str, Any]:
    content = {"type": "const_string", "value": "a"}
    return {"structural_tag": {"format": {"type": "repeat", "min": 1, "max": n, "content": content}}}


def least(limit: int, fields: Mapping[str, Make]) -> Limit:
    return Limit(limit, fields, step=-1)


def namespace(n: int) -> dict[str, Any]:
    return {"tools": [{"type": "namespace", "name": "s", "tools": tools(RESPONSES, ["f" * (n - 3)])}]}


LIMITS = {
    # -- lengths, in tokens
    "prompt of which nothing is generated": Limit(
        WINDOW,
        {
            COMPLETIONS: lambda n: {"prompt": "a" * n, "echo": True, "logprobs": 1, "max_tokens": 0},
            EMBEDDINGS: lambda n: {"input": [65] * n},
            SCORE: lambda n: {"text_1": "a" * n},
            RERANK: lambda n: {"query": "a" * n},
        },
        "max_model_len",
        relative=True,
        small=True,
    ),
    "prompt": Limit(
        WINDOW - 1,
        at([COMPLETIONS], prompt=lambda n: "a" * n) | at([RESPONSES], input=lambda n: "a" * (n - 18)),
        "max_model_len",
        relative=True,
        small=True,
    ),
    "`max_tokens` after a prompt of one token": Limit(
        WINDOW - 1, at([COMPLETIONS], max_tokens=value), "max_model_len", relative=True, small=True
    ),
    "`max_tokens`, at least": least(
        1,
        at((COMPLETIONS, CHAT, MESSAGES), max_tokens=value) | at([RESPONSES], max_output_tokens=value),
    ),
    "`min_tokens`": Limit(
        9,
        at((COMPLETIONS, CHAT), min_tokens=value, max_tokens=lambda n: 9)
        | at([RESPONSES], min_tokens=value, max_output_tokens=lambda n: 9),
        relative=True,
    ),
    "`min_tokens`, at least": least(0, at(SAMPLED, min_tokens=value)),
    "`thinking_token_budget`, `thinking.budget_tokens`, at least": Limit(
        0,
        at((CHAT, RESPONSES), thinking_token_budget=value)
        | at([MESSAGES], thinking=lambda n: {"type": "enabled", "budget_tokens": n}),
        step=-2,  # -1 stands for no limit in the first two
    ),
    "`truncate_prompt_tokens`, at least": least(1, at((COMPLETIONS, CHAT, *EMBEDDED), truncate_prompt_tokens=value)),
    # -- numbers of prompts and answers
    "prompts, inputs, texts or documents in a call": Limit(
        PROMPTS,
        {
            COMPLETIONS: lambda n: {"prompt": ["a"] * n},
            EMBEDDINGS: lambda n: {"input": ["a"] * n},
            SCORE: lambda n: {"text_2": ["a"] * n},
            RERANK: lambda n: {"documents": ["a"] * n},
        },
        "--max-prompts",
        documented=2048,
    ),
    "`n`": Limit(64, at((COMPLETIONS, CHAT), n=value), "max_n"),
    "`best_of`": Limit(64, at([COMPLETIONS], best_of=value), "max_n"),
    "`top_n`, at least": least(0, at([RERANK], top_n=value)),
    "`max_tokens_per_doc`, at least": least(1, at([RERANK], max_tokens_per_doc=value)),
    "`dimensions`, at least": least(1, at([EMBEDDINGS], dimensions=value)),
    # -- where an answer ends
    "entries of `stop`, `stop_sequences`": Limit(
        16, at(SAMPLED, stop=entries("x")) | at([MESSAGES], stop_sequences=entries("x")), "max_stop_strings"
    ),
    "characters of a stop string": Limit(
        MAX_STRING, at(SAMPLED, stop=lambda n: "x" * n) | at([MESSAGES], stop_sequences=lambda n: ["x" * n])
    ),
    "entries of `stop_token_ids`": Limit(MAX_STOP_TOKENS, at(SAMPLED, stop_token_ids=entries(1))),
    # -- sampling
    "entries of `bad_words`": Limit(MAX_BAD_WORDS, at(SAMPLED, bad_words=entries("x"))),
    "characters of a bad word": Limit(MAX_STRING, at(SAMPLED, bad_words=lambda n: ["x" * n])),
    "entries of `logit_bias`": Limit(
        MAX_LOGIT_BIAS, at(SAMPLED, logit_bias=lambda n: {str(token): 1 for token in range(n)})
    ),
    "bias of a token": Limit(100, at(SAMPLED, logit_bias=lambda n: {"1": n})),
    "bias of a token, at least": least(-100, at(SAMPLED, logit_bias=lambda n: {"1": n})),
    "`logprobs`, `top_logprobs`": Limit(
        20,
        at([COMPLETIONS], logprobs=value)
        | at([CHAT], logprobs=lambda n: True, top_logprobs=value)
        | at([RESPONSES], top_logprobs=value),
        "max_logprobs",
    ),
    "`prompt_logprobs`": Limit(20, at((COMPLETIONS, CHAT), prompt_logprobs=value), "max_logprobs"),
    "`seed`": Limit(MAX_SEED, at(SAMPLED, seed=value)),
    "`seed`, at least": least(-MAX_SEED - 1, at(SAMPLED, seed=value)),
    "`temperature`": Limit(100, at(GENERATED, temperature=value)),
    "`temperature`, at least": least(0, at(GENERATED, temperature=value)),
    "`top_p`": Limit(1, at(GENERATED, top_p=value)),
    "`top_p`, at least": least(0, at(GENERATED, top_p=value)),
    "`min_p`": Limit(1, at(SAMPLED, min_p=value)),
    "`min_p`, at least": least(0, at(SAMPLED, min_p=value)),
    "`top_k`, at least": least(-1, at(GENERATED, top_k=value)),
    "`presence_penalty`, `frequency_penalty`": Limit(2, at(SAMPLED, presence_penalty=value)),
    "`presence_penalty`, `frequency_penalty`, at least": least(-2, at(SAMPLED, frequency_penalty=value)),
    "`repetition_penalty`, above 0": Limit(100, at(SAMPLED, repetition_penalty=value)),
    "token id": Limit(
        VOCABULARY - 1,
        at(SAMPLED, stop_token_ids=lambda n: [n]) | at([EMBEDDINGS], input=lambda n: [n]),
        relative=True,
    ),
    "token id of `allowed_token_ids`": Limit(
        VOCABULARY - 1, at(SAMPLED, allowed_token_ids=lambda n: [1, n]), relative=True
    ),
    "token id of `logit_bias`": Limit(VOCABULARY - 1, at(SAMPLED, logit_bias=lambda n: {str(n): 1}), relative=True),
    # -- structured output and tools
    "entries of `choice`": Limit(MAX_CHOICES, at(SAMPLED, structured_outputs=lambda n: {"choice": ["a"] * n})),
    "characters of a schema, as JSON": Limit(
        MAX_GRAMMAR,
        {
            COMPLETIONS: chat_schema,
            CHAT: chat_schema,
            RESPONSES: lambda n: {"text": {"format": {"type": "json_schema", "name": "s", "schema": schema(n)}}},
            MESSAGES: lambda n: {"output_config": {"format": {"type": "json_schema", "schema": schema(n)}}},
        },
    ),
    "characters of a regular expression": Limit(
        MAX_GRAMMAR, at(SAMPLED, structured_outputs=lambda n: {"regex": "a" * n})
    ),
    "characters of a grammar": Limit(MAX_GRAMMAR, at(SAMPLED, structured_outputs=lambda n: {"grammar": "a" * n})),
    "entries of `tools`": Limit(MAX_TOOLS, tools_of(lambda n: (f"f{i}" for i in range(n)))),
    "characters of a tool's name": Limit(MAX_TOOL_NAME, tools_of(lambda n: ["f" * n])),
    "characters of a tool's name with its namespace": Limit(MAX_TOOL_NAME, {RESPONSES: namespace}),
    # -- the queue, and what is kept
    "`priority`": Limit(MAX_PRIORITY, at(BODIES, priority=value)),
    "`priority`, at least": least(MIN_PRIORITY, at(BODIES, priority=value)),
    "characters of `cache_salt`": Limit(MAX_SALT, at(GENERATED, cache_salt=lambda n: "s" * n)),
    "characters of a message's `role`": Limit(64, {CHAT: lambda n: {"messages": [{"role": "r" * n, "content": "hi"}]}}),
    "entries of `metadata` of a response": Limit(
        16, {RESPONSES: lambda n: {"metadata": {str(i): "x" for i in range(n)}}}
    ),
    "characters of a name in `metadata` of a response": Limit(64, {RESPONSES: lambda n: {"metadata": {"k" * n: "x"}}}),
    "characters of a value in `metadata` of a response": Limit(
        512, {RESPONSES: lambda n: {"metadata": {"k": "x" * n}}}
    ),
    **{
        f"characters of `{name}` of a response": Limit(512, at([RESPONSES], **{name: lambda n: "x" * n}))
        for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
    },
    "`max_tool_calls`, at least": least(1, at([RESPONSES], max_tool_calls=value)),
}
