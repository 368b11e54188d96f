"""Conversations from a file: the first question, and the length of its answer."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text

# The limits of `vllm bench serve`, with which published figures for ShareGPT were measured.
MIN_TOKENS, MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
FORMS = (
    '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} or {"prompt", "completion"}'
)
HUMAN, ASSISTANT = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")


def sharegpt_samples(
    vocabulary: Vocabulary,
    n: int,
    rng: np.random.Generator,
    *,
    path: str | Path,
    output_len: int | None = None,
    max_input_tokens: int = MAX_INPUT_TOKENS,
    max_total_tokens: int = MAX_TOTAL_TOKENS,
    as_text: bool = True,
) -> list[Sample]:
    """Return `n` samples, in random order, from a JSON list or JSON lines of conversations.

    `output_len` replaces the lengths of the answers. As in vLLM, very short conversations and those beyond the two
    limits are left out. If the file has fewer than `n` conversations, some are repeated, which a prefix cache will
    notice.

    Raise ConfigError, naming the file and the faulty entry, or if no conversation is within the limits.
    """
    pairs = list(_pairs(Path(path)))
    samples: list[Sample] = []
    for i in rng.permutation(len(pairs)).tolist():
        if len(samples) == n:
            return samples
        question, answer = pairs[i]
        ids = vocabulary.encode(question)
        output = len(vocabulary.encode(answer, special=False)) if output_len is None else output_len
        too_short = len(ids) < MIN_TOKENS or (output_len is None and output < MIN_TOKENS)
        if too_short or len(ids) > max_input_tokens or len(ids) + output > max_total_tokens:
            continue
        samples.append(Sample(question if as_text else tuple(ids), len(ids), output))
    if not samples:
        limits = f"prompts of {MIN_TOKENS} to {max_input_tokens} tokens, {max_total_tokens} with the answer"
        raise ConfigError(f"{path}: none of its {len(pairs)} conversations are within the limits ({limits})")
    repeated = rng.integers(len(samples), size=n - len(samples)).tolist()
    return samples + [samples[i] for i in repeated]


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the question and answer of every entry that has both."""
    for place, entry in _entries(path):
        if not isinstance(entry, Mapping) or not ("conversations" in entry or {"prompt", "completion"} <= entry.keys()):
            raise ConfigError(f"{path}, {place} is not a conversation: expected {FORMS}")
        try:
            pair = _first_exchange(entry["conversations"]) if "conversations" in entry else _prompt(entry)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}, {place} is not a conversation ({error!r}): expected {FORMS}") from error
        if pair is not None:
            yield pair


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a JSON list or JSON lines, each with its place in the file."""
    text = read_text(path, encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        yield from ((f"entry {i}", entry) for i, entry in enumerate(parse_json(text, path)))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", parse_json(line, f"{path}, line {number}")


def _first_exchange(turns: list[Mapping[str, str]]) -> tuple[str, str] | None:
    """Return the user's first turn that the assistant answered, and the answer, or None."""
    for question, answer in pairwise(turns):
        if question["from"] in HUMAN and answer["from"] in ASSISTANT:
            return _texts(question["value"], answer["value"])
    return None


def _prompt(entry: Mapping[str, str]) -> tuple[str, str]:
    return _texts(entry["prompt"], entry["completion"])


def _texts(question: Any, answer: Any) -> tuple[str, str]:
    if not isinstance(question, str) or not isinstance(answer, str):
        raise TypeError("question and answer must be text")
    return question, answer
