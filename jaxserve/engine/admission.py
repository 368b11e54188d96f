"""Admission of a request: what the queue and the model must allow, and the sequences that are made for it."""

from collections import abc

from jaxserve.core.errors import QueueFull, RequestError
from jaxserve.core.request import Request, Sequence
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.limits import check_params, check_prompt, check_vocabulary
from jaxserve.engine.matchers import matchers_of
from jaxserve.engine.text import StopStrings
from jaxserve.engine.tokenizer import Tokenizer


def check_request(request: Request, info: ModelInfo, tokenizer: Tokenizer | None) -> None:
    """Raise `RequestError` if the model cannot serve a request."""
    params, prompt = request.params, request.prompt_token_ids
    check_prompt(info, prompt, generates=request.generates)
    if request.embed:
        return
    check_params(info, params, len(prompt))
    for name, value in (("stop", params.stop_strings), ("bad_words", params.bad_words)):
        if value and tokenizer is None:
            raise RequestError(f"{name} is text, but the model has no tokenizer", field=name)
    for word in _bad_words(params.bad_words or (), tokenizer):
        check_vocabulary(info, "bad_words", word)


def check_room(request: Request, waiting: int, waiting_tokens: int, info: ModelInfo) -> None:
    """Raise `QueueFull` if a queue has no room. An empty queue has room for the tokens of every request.

    `waiting` and `waiting_tokens` are the sequences in the queue and their prompt tokens.
    """
    params = request.params
    if waiting + params.n > info.max_queued_requests:
        raise QueueFull(
            f"{waiting} sequences are waiting, the limit is {info.max_queued_requests} (max_queued_requests)",
            value=waiting,
            limit=info.max_queued_requests,
        )
    tokens = len(request.prompt_token_ids) * params.n
    if waiting and waiting_tokens + tokens > info.max_queued_tokens:
        raise QueueFull(
            f"{waiting_tokens} prompt tokens are waiting, {tokens} more would exceed the limit of "
            f"{info.max_queued_tokens} (max_queued_tokens)",
            value=waiting_tokens + tokens,
            limit=info.max_queued_tokens,
        )


def make_sequences(
    request: Request,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    *,
    eos_token_ids: frozenset[int],
    seed: int,
    salt: str,
) -> list[Sequence]:
    """Return the n sequences of a request. The first has the given seed, and each further one the next."""
    params, limit = request.params, info.max_model_len
    wanted = limit if params.max_tokens is None else len(request.prompt_token_ids) + params.max_tokens
    stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_token_ids)
    bad_words = _bad_words(params.bad_words or (), tokenizer)
    matchers = matchers_of(request, info.vocab_size)
    text = tokenizer if params.detokenize and not request.embed else None
    sequences: list[Sequence] = []
    for index in range(params.n):
        detokenizer = None if text is None else text.stream(params.skip_special_tokens, after=request.prompt_token_ids)
        sequences.append(
            Sequence(
                request=request,
                index=index,
                seed=(seed + index) % 2**64,
                max_total=min(wanted, limit),
                detokenizer=detokenizer,
                stops=StopStrings(params.stop_strings) if params.stop_strings else None,
                parent=sequences[0] if sequences else None,
                stop_ids=stops,
                length_alone=not stops and detokenizer is None and matchers[index] is None,
                bad_words=bad_words,
                matcher=matchers[index],
                # Nothing precedes the first token.
                prompt_logprobs=[] if params.prompt_logprobs is None else [None],
                salt=salt,
            )
        )
    return sequences


def _bad_words(words: abc.Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to avoid: each word on its own and after a space."""
    if tokenizer is None or not words:
        return ()
    spellings = {f"{space}{word.lstrip()}" for word in words for space in ("", " ")}
    encoded = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings}
    return tuple(sorted(word for word in encoded if word))
