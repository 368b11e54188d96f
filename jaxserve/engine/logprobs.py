"""The log-probabilities of a sequence's tokens and of its prompt, as the outputs of steps bring them."""

import numpy as np

from jaxserve.core.request import Logprob, Sequence, TokenLogprobs
from jaxserve.core.work import Chunk, StepOutput
from jaxserve.engine.tokenizer import Tokenizer


def take_logprobs(tokenizer: Tokenizer | None, sequence: Sequence, token: int, output: StepOutput, row: int) -> None:
    """Add the log-probabilities of a sequence's newest token, which row `row` of a step has sampled."""
    assert output.logprob is not None
    assert output.rank is not None
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    count = sequence.params.logprobs or 0
    top = output.top_ids[row, :count], output.top_logprobs[row, :count]
    entry = _entry(tokenizer, token, output.logprob[row], output.rank[row], *top)
    sequence.logprobs.append(entry)
    sequence.cumulative_logprob += entry[token].logprob


def take_prompt_logprobs(tokenizer: Tokenizer | None, chunk: Chunk, arrays: tuple[np.ndarray, ...]) -> None:
    """Add the log-probabilities of the prompt tokens that follow a chunk's tokens (`StepOutput.prompt_logprobs`)."""
    sequence, count = chunk.sequence, chunk.sequence.params.prompt_logprobs or 0
    for offset, (logprob, rank, ids, values) in enumerate(zip(*arrays, strict=True)):
        position = chunk.start + offset + 1
        if position == len(sequence.prompt_logprobs):  # else it is known from an earlier computation
            entry = _entry(tokenizer, sequence.tokens[position], logprob, rank, ids[:count], values[:count])
            sequence.prompt_logprobs.append(entry)


def _entry(
    tokenizer: Tokenizer | None, token: int, logprob: float, rank: int, ids: np.ndarray, values: np.ndarray
) -> TokenLogprobs:
    """Return the log-probabilities at one position: of `token`, then of the likeliest tokens `ids` with `values`."""
    text = tokenizer.token if tokenizer is not None else lambda _: None
    entry = {token: Logprob(float(logprob), int(rank), text(token))}
    for place, (other, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1):
        entry.setdefault(other, Logprob(value, place, text(other)))
    return entry
