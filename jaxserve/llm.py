"""The library for scripts and notebooks. Its callers wait for an engine that steps in a thread of its own."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from inspect import Parameter
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Unpack

import numpy as np

from jaxserve.build import build_engine
from jaxserve.console.progress import progress_bar, start_progress
from jaxserve.core.config import EngineConfig
from jaxserve.core.engine_options import EngineOptions
from jaxserve.core.errors import EngineStopped, NoTokenizer, RequestError
from jaxserve.core.keywords import explains_attributes, explains_keywords
from jaxserve.core.options import keyword_signature, with_options
from jaxserve.core.progress import Progress
from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.vllm_attributes import METHODS
from jaxserve.core.vllm_names import CHAT, EMBED, GENERATE, STREAM, STREAM_CHAT
from jaxserve.engine.client import Prompt
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.outputs import merge
from jaxserve.engine.prompts import PromptLike, as_params, as_prompt, as_prompts, chat_prompt, default_params
from jaxserve.engine.representation import engine_repr
from jaxserve.engine.tokenizer import Tokenizer

Message = Mapping[str, Any]


@explains_attributes(METHODS)
class LLM:
    """A model, loaded and ready to generate.

    Use it as a context manager, or call `close`, to free its memory and its thread. Several threads may use it at once.
    An exception in one of its methods, such as the KeyboardInterrupt of Ctrl-C, ends the requests of that call only.

    `help(LLM.__init__)` lists the options. Methods raise `RequestError` for what they cannot do, `EngineStopped` once
    the LLM is closed, and `EngineFailed` if a step has failed, after which the LLM must be opened again.
    """

    def __init__(
        self, model: str | Path | None = None, *, progress: bool | Progress = True, **options: Unpack[EngineOptions]
    ):
        """Load a model, compile its programs, and get ready to generate.

        `model`: a folder in Hugging Face layout, or a name on its hub, such as "Qwen/Qwen2.5-0.5B-Instruct", which is
        downloaded unless it is in the local cache (default: the bundled model). `progress`: whether the start shows how
        far it has come, or a function that is called with (activity, items done, items in all) instead. `options`:
        listed below.

        Raise `UnknownKeyword`, a `TypeError`, for an option that does not exist, `ConfigError` for a value that is not
        allowed, `CheckpointError` for a model that cannot be read, and `MemoryBudgetError` for one that does not fit.
        """
        with start_progress(progress) as report:
            self._engine = build_engine(EngineConfig(model=model, **options), report)
        self._thread = EngineThread(self._engine)
        self._closed = False

    # -- generation

    @explains_keywords(GENERATE)
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers for one or many prompts, and return their outputs in order.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. `prompt_token_ids`: the
        prompts, if `prompts` is not given. `sampling_params`: one object for all prompts, or one for each prompt; by
        default `get_default_sampling_params()`.

        Raise `RequestError` naming the parameter that is wrong, or `EngineFailed`, after which the LLM must be opened
        again. After any exception, no request of this call keeps running.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("generate needs prompts or prompt_token_ids, and not both", field="prompts")
        requests = self._pair(as_prompts(prompt_token_ids if prompts is None else prompts), sampling_params)
        return self._run(requests, use_tqdm)

    @explains_keywords(CHAT)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate answers for one or many conversations, and return their outputs in order.

        `chat_template`: used instead of the model's: a template, the name of a built-in one or a file.
        `add_generation_prompt`: the prompt ends with the beginning of an answer. `continue_final_message`: it ends
        inside the last message, which the answer continues. `tools`: functions that the model may call, in OpenAI's
        form. `template` and `chat_template_kwargs`, which takes precedence: variables of the template, e.g.
        enable_thinking.

        Raise the errors of `generate`, and `UnknownKeyword` for a variable that the template does not read.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages is {messages!r}: it must be a list of messages or a list of conversations",
                field="messages",
                value=messages,
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_prompt(
                self.tokenizer,
                conversation,
                chat_template_kwargs,
                template,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
            )
            for conversation in conversations
        ]
        return self._run(self._pair(prompts, sampling_params), use_tqdm)

    @explains_keywords(STREAM)
    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the new parts of one prompt's answers, token by token. Leaving the loop early aborts the request.

        Several streams may be read in turn, and `generate` may be called between two outputs. Tokens are computed when
        the next output is requested. Raise the errors of `generate`.
        """
        return self._stream(as_prompt(prompt), self._params(sampling_params))

    @explains_keywords(STREAM_CHAT)
    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> Generator[RequestOutput, None, None]:
        """Yield the new parts of the answers to a conversation, as `stream` does for a prompt.

        The keyword arguments are those of `chat`. Raise the errors of `chat`.
        """
        prompt = chat_prompt(self.tokenizer, messages, chat_template_kwargs, template)
        return self._stream(prompt, self._params(sampling_params))

    @explains_keywords(EMBED)
    def embed(self, prompts: PromptLike | Sequence[PromptLike], use_tqdm: bool = True) -> list[np.ndarray]:
        """Return the pooled last hidden state of each prompt, float32 [hidden_size], of unit length.

        Raise the errors of `generate`.
        """
        params = SamplingParams(max_tokens=1, detokenize=False)
        requests = [(prompt, params) for prompt in as_prompts(prompts)]
        return [output.embedding for output in self._run(requests, use_tqdm, embed=True)]

    # -- properties

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raise `NoTokenizer` if the model has none."""
        if self._engine.tokenizer is None:
            raise NoTokenizer
        return self._engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raise `NoTokenizer` if the model has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of calls that give none: those of the model's generation_config.json.

        The options `generation_config` and `override_generation_config` change them.
        """
        return default_params(self._engine.info)

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of prompt and answer together."""
        return self._engine.info.max_model_len

    def __repr__(self) -> str:
        if "_closed" not in self.__dict__:  # the start has failed
            return object.__repr__(self)
        return engine_repr("LLM", self._engine.info, list(self._engine.snapshots().values()), closed=self._closed)

    # -- lifetime

    def close(self) -> None:
        """Free the model, the KV cache and everything else on the device. Idempotent.

        Calls in progress in other threads raise `EngineStopped`.
        """
        self._closed = True
        self._thread.close()

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: an engine can neither be pickled nor copied."""
        raise TypeError("an LLM cannot be pickled or copied: open the model in each process that uses it")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers

    def _pair(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [(prompt, self._params(sampling_params)) for prompt in prompts]
        each = sampling_params
        if not (isinstance(each, Sequence) and all(isinstance(one, SamplingParams) for one in each)):
            given = type(each).__name__
            message = f"sampling_params is of type {given}: it must be SamplingParams, or a sequence of one per prompt"
            raise RequestError(message, field="sampling_params", value=each)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling_params for {len(prompts)} prompts: give one for all, or one for each",
                field="sampling_params",
            )
        return list(zip(prompts, each, strict=True))

    def _params(self, sampling_params: SamplingParams | None) -> SamplingParams:
        return self.get_default_sampling_params() if sampling_params is None else as_params(sampling_params)

    def _run(
        self, requests: list[tuple[Prompt, SamplingParams]], use_tqdm: bool, *, embed: bool = False
    ) -> list[RequestOutput]:
        self._check_open()
        outputs: dict[str, RequestOutput] = {}
        with ExitStack() as leaving:
            call = leaving.enter_context(closing(self._thread.call(requests, embed=embed)))
            bar = leaving.enter_context(progress_bar("requests", len(requests), shown=bool(use_tqdm)))
            for piece in call:
                outputs[piece.request_id] = merge(outputs.get(piece.request_id), piece)
                if piece.finished:
                    bar.advance()
        return [outputs[request_id] for request_id in call.request_ids]

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Generator[RequestOutput, None, None]:
        self._check_open()
        with closing(self._thread.call([(prompt, params)], stream=True)) as call:
            for piece in call:
                yield piece
                self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this LLM has been closed")


PROGRESS = Parameter("progress", Parameter.KEYWORD_ONLY, default=True, annotation=bool | Progress)
LLM.__signature__ = keyword_signature(EngineConfig, "model", PROGRESS)
LLM.__init__.__doc__ = with_options(LLM.__init__.__doc__, EngineConfig)
