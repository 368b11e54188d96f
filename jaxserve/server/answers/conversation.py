"""The work for one conversation: what a body of the chat API asks of the engine, and the format of its answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from jaxserve.core.request import TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import EngineClient
from jaxserve.engine.limits import cap_max_tokens, check_params
from jaxserve.parsing import AnswerFormat
from jaxserve.server.answers.generation import Job, Names
from jaxserve.server.answers.prompts import render, tokens_prompts
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.http.offload import off_loop
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.common import answer_tokens, prompt_tokens_to_keep
from jaxserve.server.state import ServerState


@dataclass(frozen=True)
class ConversationJob:
    """The work for a conversation. `form`: the format of its answers."""

    client: EngineClient
    job: Job
    form: AnswerFormat


async def conversation_job(
    state: ServerState,
    body: ChatBody,
    *,
    request_id: str,
    headers: Mapping[str, str],
    sender: str,
    names: Names | None = None,
) -> ConversationJob:
    """Return the work for a conversation, of which `headers` has the trace. `sender`: the client.

    `names`: those of a client that has not sent the body itself, for errors during generation (`Job`). Raise
    RequestError if a field of the body or the prompt breaks a limit.
    """
    client = state.client()
    body.check()
    leave = body.tokens_to_leave(body.token_limit)
    keep = prompt_tokens_to_keep(body.truncate_prompt_tokens, client.info.max_model_len, leave)
    with rename_error_fields({"prompt": "messages"}):
        text = await render(client, body, state.settings.template_defaults)
        (prompt,) = await tokens_prompts(
            client,
            [text],
            add_special_tokens=body.add_special_tokens,
            keep=keep,
            generates=body.token_limit != 0,
        )
    given = state, body, text, len(prompt.token_ids)
    # Schemas may be large.
    form, params = await off_loop(_params, *given) if body.tools or body.has_structure else _params(*given)
    trace = TraceContext("chat", headers)
    names = names or partial(rename_error_fields, body.client_names)
    job = Job(request_id, [prompt], [params], body.priority, body.cache_salt or "", trace, sender, names)
    return ConversationJob(client, job, form)


def _params(state: ServerState, body: ChatBody, prompt: str, length: int) -> tuple[AnswerFormat, SamplingParams]:
    """Return the format of answers to a prompt of `length` tokens, and the parameters for the engine."""
    info, formats = state.client().info, state.formats()
    form = formats.answer_format(body, prompt)
    clamp = state.settings.clamp_max_tokens or body.clamps_max_tokens
    limit = answer_tokens(body.token_limit, info.max_model_len - length, clamp=clamp)
    with rename_error_fields(body.client_names):
        params = body.sampling_params(
            info.default_sampling,
            max_tokens=cap_max_tokens(info, limit, length),
            logprobs=body.num_logprobs,
            structured=formats.structured(form, body.structured()),
            reasoning=formats.reasoning_section(form, body.thinking_token_budget),
            skip_special_tokens=False if formats.shows_special_tokens(form) else body.skip_special_tokens,
        )
        check_params(info, params, length)
    return form, params
