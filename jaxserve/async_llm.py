"""The library for asyncio programs. Its engine steps in threads of its own."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Unpack

import numpy as np

from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.engine_options import EngineOptions
from jaxserve.core.options import keyword_signature
from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TextPrompt
from jaxserve.engine.prompts import PromptLike, as_prompt


class AsyncLLM:
    """A model that many tasks may use at once. Use it as an asynchronous context manager, or await `close`."""

    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineOptions]):
        """`model`: a directory in Hugging Face layout (default: the bundled model).

        `options`: the fields of `EngineConfig`, described in docs/options.md. Raise `ConfigError`, `CheckpointError` or
        `MemoryBudgetError` if the engine cannot start.
        """
        self._engine = build_async_engine(EngineConfig(model=model, **options))

    @property
    def engine(self) -> AsyncEngine:
        """The engine, which has methods for metrics, health and draining."""
        return self._engine

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **request: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of a prompt's answers. Closing the generator aborts the request.

        `request`: any of request_id, priority (smaller is served first) and salt (of the prefix cache). Raise
        `RequestError`, `QueueFull`, `EngineStopped` or `EngineFailed`.
        """
        return self._engine.generate(as_prompt(prompt), params or SamplingParams(), **request)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **request: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of the answers to a conversation, as `stream` does for a prompt.

        Raise `NoTokenizer` for a model without a tokenizer, and the errors of `stream`.
        """
        text = self._engine.tokenizer.apply_chat_template(list(messages))
        prompt = TextPrompt(text, add_special_tokens=False)
        return self._engine.generate(prompt, params or SamplingParams(), **request)

    async def embed(self, prompt: PromptLike) -> np.ndarray:
        """Return the pooled last hidden state of a prompt, float32 [hidden_size], of unit length.

        Raise the errors of `stream`.
        """
        output = await self._engine.embed(as_prompt(prompt))
        return np.asarray(output.embedding)

    async def close(self) -> None:
        """End all requests, and free the model and everything else on the device. Idempotent."""
        await self._engine.shutdown()

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: an engine can neither be pickled nor copied."""
        raise TypeError("an AsyncLLM cannot be pickled or copied: open the model in each process that uses it")

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


AsyncLLM.__signature__ = keyword_signature(EngineConfig, first="model")
