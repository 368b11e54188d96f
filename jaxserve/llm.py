"""LLM: the library for scripts and notebooks. Synchronous, in the caller's thread."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineStopped, NoTokenizer, RequestError
from jaxserve.core.progress import Progress, untold
from jaxserve.core.request import RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import Prompt, TextPrompt
from jaxserve.engine.outputs import merge
from jaxserve.engine.prompts import PromptLike, as_prompt, as_prompts
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.factory import build_engine

Message = Mapping[str, Any]


class LLM:
    """A model, loaded and ready to generate.

    Use it as a context manager, or call `close`, to free everything it holds. One thread at a time.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress = untold, **options: Any):
        """`model`: a directory in Hugging Face layout (default: the bundled model).

        `options` are the fields of `EngineConfig`: dtype, tp, memory_gb, max_model_len, load_format, ... Raises
        `ConfigError`, `CheckpointError` or `MemoryBudgetError`. `progress` is told how far it is while it starts; by
        default nothing is.
        """
        self._engine = build_engine(EngineConfig(model=model, **options), progress)
        self._closed = False
        self._pieces: dict[str, deque[RequestOutput]] = {}  # not yet given out, of each stream in progress

    # -- generation

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for one or many prompts and returns their outputs in order.

        A prompt is a text, a list of token ids, or {"prompt": text} or {"prompt_token_ids": ids}. `params` is one for
        all prompts or one for each. Raises `RequestError` naming what is wrong; then nothing keeps running.
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
        """Answers one conversation or several, written out by the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._chat_prompt(conversation, template) for conversation in conversations]
        return self._run(self._pair(prompts, params), use_tqdm)

    def stream(self, prompt: PromptLike, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yields what is new of one prompt's answers, token by token. Leaving the loop early aborts the request.

        Several streams may be read in turns, and `generate` called between two pieces.
        """
        return self._stream(as_prompt(prompt), params or SamplingParams())

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[RequestOutput]:
        """As `stream`, for a conversation."""
        return self._stream(self._chat_prompt(messages, template), params or SamplingParams())

    def embed(self, prompts: PromptLike | Sequence[PromptLike], use_tqdm: bool = True) -> list[np.ndarray]:
        """The pooled last hidden state of each prompt, float32[hidden_size], of unit length."""
        params = SamplingParams(max_tokens=1, detokenize=False)
        requests = [(prompt, params) for prompt in as_prompts(prompts)]
        return [output.embedding for output in self._run(requests, use_tqdm, embed=True)]

    # -- what it is

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `NoTokenizer` where the model has none."""
        if self._engine.tokenizer is None:
            raise NoTokenizer
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self._engine.info.max_model_len

    # -- lifetime

    def settle(self) -> None:
        """Waits for executables that are being compiled in the background; what is measured next has them."""
        self._check_open()
        self._engine.settle()

    def close(self) -> None:
        """Frees the model, the KV cache and everything else on the device. Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _chat_prompt(self, messages: Sequence[Message], template: Mapping[str, Any]) -> Prompt:
        text = self.tokenizer.apply_chat_template(list(messages), **template)
        return TextPrompt(text, add_special_tokens=False)  # the template writes them itself

    def _pair(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params or SamplingParams()) for prompt in prompts]
        if not (isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)):
            raise RequestError("params are SamplingParams, for all prompts or each", field="params", value=params)
        if len(params) != len(prompts):
            raise RequestError(f"there are {len(prompts)} prompts and {len(params)} params", field="params")
        return list(zip(prompts, params, strict=True))

    def _run(
        self, requests: list[tuple[Prompt, SamplingParams]], use_tqdm: bool, *, embed: bool = False
    ) -> list[RequestOutput]:
        self._check_open()
        engine = self._engine
        waiting = deque(requests)
        order: list[str] = []
        results: dict[str, RequestOutput] = {}
        unfinished = len(requests)
        with tqdm(total=len(requests), desc="Requests", unit="req", disable=not use_tqdm) as progress:
            try:
                while unfinished:
                    self._fill(waiting, order, embed)
                    for piece in self._step():
                        results[piece.request_id] = merge(results.get(piece.request_id), piece)
                        progress.update(piece.finished)
                        unfinished -= piece.finished
            except BaseException:
                for request_id in order:
                    engine.abort(request_id)
                raise
            finally:
                self._drain()
        return [results[request_id] for request_id in order]

    def _fill(self, waiting: deque[tuple[Prompt, SamplingParams]], order: list[str], embed: bool) -> None:
        """Hands on as many requests as the bounded queue has room for; the first one always, to be judged. Mutates."""
        while waiting and (self._engine.idle or waiting[0][1].n <= self._engine.room):
            prompt, params = waiting.popleft()
            order.append(self._engine.add(prompt, params, embed=embed, stream=False))

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        self._check_open()
        request_id = self._engine.add(prompt, params)
        pieces = self._pieces[request_id] = deque()
        try:
            while True:
                while not pieces:
                    self._check_open()
                    self._step()
                piece = pieces.popleft()
                yield piece
                if piece.finished:
                    return
        finally:
            del self._pieces[request_id]
            self._engine.abort(request_id)
            self._drain()

    def _step(self) -> list[RequestOutput]:
        """One step. Returns the pieces of `generate`'s requests; those of streams wait until they are read. Mutates."""
        others = []
        for piece in self._engine.step():
            self._pieces.get(piece.request_id, others).append(piece)
        return others

    def _drain(self) -> None:
        """Takes in the step that is still on the device, so that nothing is left over when no stream is in progress."""
        while not (self._closed or self._pieces or self._engine.idle):
            self._engine.step()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this LLM has been closed")
