"""The library for asyncio programs. Its engine steps in threads of its own."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Unpack

import numpy as np

from jaxserve.build import build_async_engine
from jaxserve.console.progress import start_progress
from jaxserve.core.config import EngineConfig
from jaxserve.core.engine_options import EngineOptions
from jaxserve.core.errors import RequestError
from jaxserve.core.keywords import explains_attributes, explains_keywords
from jaxserve.core.options import keyword_signature, with_options
from jaxserve.core.plain_values import plain
from jaxserve.core.progress import Progress
from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.vllm_attributes import ASYNC_METHODS
from jaxserve.core.vllm_names import ASYNC_STREAM, EMBED
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import Prompt
from jaxserve.engine.prompts import PromptLike, as_params, as_prompt, chat_prompt, default_params
from jaxserve.engine.representation import engine_repr


@explains_attributes(ASYNC_METHODS)
class AsyncLLM:
    """A model that many tasks may use at once. Use it as an asynchronous context manager, or await `close`.

    `help(AsyncLLM.__init__)` lists the options. Methods raise the errors of those of `LLM`, and `QueueFull`.
    """

    def __init__(
        self, model: str | Path | None = None, *, progress: bool | Progress = True, **options: Unpack[EngineOptions]
    ):
        """Load a model, compile its programs, and get ready to generate.

        `model`: a folder in Hugging Face layout, or a name on its hub, such as "Qwen/Qwen2.5-0.5B-Instruct", which is
        downloaded unless it is in the local cache (default: the bundled model). `progress`: whether the start shows how
        far it has come, or a function that is called with (activity, items done, items in all) instead. `options`:
        listed below. Raise the errors of `LLM`.
        """
        with start_progress(progress) as report:
            self._engine = build_async_engine(EngineConfig(model=model, **options), report)

    @property
    def engine(self) -> AsyncEngine:
        """The engine, which has methods for metrics, health and draining."""
        return self._engine

    @explains_keywords(ASYNC_STREAM)
    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of a prompt's answers. Closing the generator aborts the request.

        `priority`: smaller values are served first. `salt`: requests with different salts share no pages of the prefix
        cache. Raise `RequestError`, `QueueFull`, `EngineStopped` or `EngineFailed`.
        """
        return self._stream(as_prompt(prompt), sampling_params, request_id, priority, salt)

    @explains_keywords(ASYNC_STREAM)
    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of the answers to a conversation, as `stream` does for a prompt.

        The further keyword arguments are those of `LLM.chat`. Raise `NoTokenizer` for a model without a tokenizer,
        `UnknownKeyword` for a variable that the template does not read, and the errors of `stream`.
        """
        prompt = chat_prompt(self._engine.tokenizer, messages, chat_template_kwargs, template)
        return self._stream(prompt, sampling_params, request_id, priority, salt)

    def _params(self, sampling_params: SamplingParams | None) -> SamplingParams:
        return self.get_default_sampling_params() if sampling_params is None else as_params(sampling_params)

    def _stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str | None, priority: int, salt: str
    ) -> AsyncGenerator[RequestOutput, None]:
        priority = plain(priority)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority is {priority!r}: it must be an integer", field="priority", value=priority)
        for name, value in (("salt", salt), ("request_id", request_id or "")):
            if not isinstance(value, str):
                raise RequestError(f"{name} is {value!r}: it must be a text", field=name, value=value)
        params = self._params(sampling_params)
        return self._engine.generate(prompt, params, request_id=request_id, priority=priority, salt=salt)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of calls that give none, as `LLM.get_default_sampling_params`."""
        return default_params(self._engine.info)

    @explains_keywords(EMBED)
    async def embed(self, prompt: PromptLike) -> np.ndarray:
        """Return the pooled last hidden state of a prompt, float32 [hidden_size], of unit length.

        Raise the errors of `stream`.
        """
        output = await self._engine.embed(as_prompt(prompt))
        return np.asarray(output.embedding)

    async def close(self) -> None:
        """End all requests, and free the model and everything else on the device. Idempotent."""
        await self._engine.shutdown()

    def __repr__(self) -> str:
        if "_engine" not in self.__dict__:  # the start has failed
            return object.__repr__(self)
        snapshots = list(self._engine.snapshots().values())
        return engine_repr("AsyncLLM", self._engine.info, snapshots, closed=self._engine.draining)

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: an engine can neither be pickled nor copied."""
        raise TypeError("an AsyncLLM cannot be pickled or copied: open the model in each process that uses it")

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


PROGRESS = Parameter("progress", Parameter.KEYWORD_ONLY, default=True, annotation=bool | Progress)
AsyncLLM.__signature__ = keyword_signature(EngineConfig, "model", PROGRESS)
AsyncLLM.__init__.__doc__ = with_options(AsyncLLM.__init__.__doc__, EngineConfig)
