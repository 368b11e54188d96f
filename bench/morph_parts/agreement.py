"""How often full precision would have chosen the tokens that were generated, had it come to the same place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams

REQUESTS = 640  # scored of each result


@dataclass(frozen=True)
class Agreement:
    """Of greedy answers, teacher-forced through the model in full precision."""

    share: float  # of the tokens that are its first choice
    tokens: int
    skipped: int  # answers whose text does not encode to as many tokens as were generated


def agreements(llm: LLM, results: Sequence[Mapping[str, Any]], *, requests: int = REQUESTS) -> list[Agreement | None]:
    """One for each result, of `requests` of its answers at most, drawn at random; None without any to score.

    A result has texts and no token ids: they are encoded again, and answers that do not come out at as many tokens as
    the server counted are left out. What is said of full precision's own answers is the ceiling: steps of other shapes
    round differently, and near ties then fall otherwise.
    """
    return [_agreement(llm, result, requests) for result in results]


def _agreement(llm: LLM, result: Mapping[str, Any], requests: int) -> Agreement | None:
    tokenizer = llm.tokenizer
    done = [i for i, error in enumerate(result["errors"]) if not error]
    drawn = np.random.default_rng(0).permutation(done)[:requests].tolist()
    pairs, skipped = [], 0
    for index in drawn:
        answer = tokenizer.encode(result["generated_texts"][index], add_special_tokens=False)
        if len(answer) == result["output_lens"][index]:
            pairs.append((result["prompts"][index], answer))
        else:
            skipped += 1
    if not pairs:
        return None
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([[*prompt, *answer] for prompt, answer in pairs], params, use_tqdm=False)
    first = 0
    for (prompt, answer), output in zip(pairs, outputs, strict=True):
        steps = output.prompt_logprobs[len(prompt) :]
        first += sum(step[token].rank == 1 for token, step in zip(answer, steps, strict=True))
    total = sum(len(answer) for _, answer in pairs)
    return Agreement(first / total, total, skipped)
