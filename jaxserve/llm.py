"""The library for scripts and notebooks. Its callers wait for an engine that steps in a thread of its own."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Unpack

import numpy as np

from jaxserve.build import build_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.engine_options import EngineOptions
from jaxserve.core.errors import EngineStopped, NoTokenizer, RequestError
from jaxserve.core.options import keyword_signature
from jaxserve.core.progress import Progress, ignore_progress
from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import Prompt, TextPrompt
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.outputs import merge
from jaxserve.engine.progress_bar import ProgressBar
from jaxserve.engine.prompts import PromptLike, as_prompt, as_prompts
from jaxserve.engine.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model, loaded and ready to generate.

    Use it as a context manager, or call `close`, to free its memory and its thread. Several threads may use it at once.
    An exception in one of its methods, such as the KeyboardInterrupt of Ctrl-C, ends the requests of that call only.
    """

    def __init__(
        self, model: str | Path | None = None, *, progress: Progress = ignore_progress, **options: Unpack[EngineOptions]
    ):
        """`model`: a directory in Hugging Face layout (default: the bundled model).

        `options`: the fields of `EngineConfig`, described in docs/options.md. `progress`: called while the engine
        starts. Raise `ConfigError`, `CheckpointError` or `MemoryBudgetError` if the engine cannot start.
        """
        self._engine = build_engine(EngineConfig(model=model, **options), progress)
        self._thread = EngineThread(self._engine)
        self._closed = False

    # -- generation

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate answers for one or many prompts, and return their outputs in order.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. `params`: one object for
        all prompts, or one for each prompt.

        Raise `RequestError` naming the parameter that is wrong, or `EngineFailed`, after which the LLM must be opened
        again. After any exception, no request of this call keeps running.
        """
        requests = self._pair(as_prompts(prompts), params)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate answers for one or many conversations, and return their outputs in order.

        `template`: further variables of the model's chat template, e.g. enable_thinking, and `tools` that the model may
        call, in OpenAI's form. Raise the errors of `generate`.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages is {messages!r}: it must be a list of messages or a list of conversations",
                field="messages",
                value=messages,
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._chat_prompt(conversation, template) for conversation in conversations]
        return self._run(self._pair(prompts, params), use_tqdm)

    def stream(self, prompt: PromptLike, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Yield the new parts of one prompt's answers, token by token. Leaving the loop early aborts the request.

        Several streams may be read in turn, and `generate` may be called between two outputs. Tokens are computed when
        the next output is requested. Raise the errors of `generate`.
        """
        return self._stream(as_prompt(prompt), params or SamplingParams())

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Generator[RequestOutput, None, None]:
        """Yield the new parts of the answers to a conversation, as `stream` does for a prompt.

        `template`: further variables of the chat template, as in `chat`. Raise the errors of `generate`.
        """
        return self._stream(self._chat_prompt(messages, template), params or SamplingParams())

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

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of prompt and answer together."""
        return self._engine.info.max_model_len

    # -- lifetime

    def settle(self) -> None:
        """Wait for executables that are being compiled in the background, so that later measurements use them."""
        self._check_open()
        self._engine.settle()

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

    def _chat_prompt(self, messages: Sequence[Message], template: Mapping[str, Any]) -> Prompt:
        text = self.tokenizer.apply_chat_template(list(messages), **template)
        return TextPrompt(text, add_special_tokens=False)  # the template writes special tokens itself

    def _pair(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params or SamplingParams()) for prompt in prompts]
        if not (isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)):
            given = type(params).__name__
            message = f"params is of type {given}: it must be SamplingParams, or a sequence of one for each prompt"
            raise RequestError(message, field="params", value=params)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(params)} params for {len(prompts)} prompts: give one for all, or one for each", field="params"
            )
        return list(zip(prompts, params, strict=True))

    def _run(
        self, requests: list[tuple[Prompt, SamplingParams]], use_tqdm: bool, *, embed: bool = False
    ) -> list[RequestOutput]:
        self._check_open()
        outputs: dict[str, RequestOutput] = {}
        with ExitStack() as leaving:
            call = leaving.enter_context(closing(self._thread.call(requests, embed=embed)))
            progress = None
            if use_tqdm:
                progress = leaving.enter_context(ProgressBar(len(requests), "req", "Requests"))
            for piece in call:
                outputs[piece.request_id] = merge(outputs.get(piece.request_id), piece)
                if progress is not None:
                    progress.update(piece.finished)
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


LLM.__signature__ = keyword_signature(EngineConfig, first="model")
