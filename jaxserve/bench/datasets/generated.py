"""Generated prompts: random tokens, with or without prefixes that prompts share."""

import numpy as np

from jaxserve.bench.datasets.lengths import Lengths
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample
from jaxserve.core.errors import ConfigError


def random_samples(
    vocabulary: Vocabulary,
    n: int,
    rng: np.random.Generator,
    *,
    input_len: Lengths,
    output_len: Lengths,
    prefix_len: int = 0,
    as_text: bool = False,
) -> list[Sample]:
    """Return `n` prompts of random tokens, all of which begin with the same `prefix_len` tokens.

    The prefix comes on top of `input_len`.
    """
    inputs, outputs = input_len.sample(rng, n).tolist(), output_len.sample(rng, n).tolist()
    if as_text:
        head = vocabulary.text_of_length(rng, prefix_len)[0] if prefix_len else ""
        texts = [vocabulary.text_of_length(rng, prefix_len + length, head=head) for length in inputs]
        return [Sample(text, count, output) for (text, count), output in zip(texts, outputs, strict=True)]
    prefix = vocabulary.random_ids(rng, prefix_len)
    prompts = [prefix + vocabulary.random_ids(rng, length) for length in inputs]
    return [Sample(prompt, len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]


def prefix_samples(
    vocabulary: Vocabulary,
    n: int,
    rng: np.random.Generator,
    *,
    num_prefixes: int = 10,
    prefix_len: int = 256,
    suffix_len: int = 256,
    output_len: int = 128,
    as_text: bool = False,
) -> list[Sample]:
    """Return `n` prompts in random order, with `num_prefixes` random prefixes used equally often.

    Every suffix is used once. Raise ConfigError if a number is below 1.
    """
    numbers = {"prefixes": num_prefixes, "prefix": prefix_len, "suffix": suffix_len, "output": output_len}
    for what, number in numbers.items():
        if number < 1:
            raise ConfigError(f"prefix repetition has {what} {number}: it must be at least 1")
    choices = rng.permutation(np.arange(n) % num_prefixes).tolist()
    total = prefix_len + suffix_len
    if as_text:
        heads = [vocabulary.text_of_length(rng, prefix_len)[0] for _ in range(num_prefixes)]
        texts = [vocabulary.text_of_length(rng, total, head=heads[i]) for i in choices]
        return [Sample(text, count, output_len) for text, count in texts]
    prefixes = [vocabulary.random_ids(rng, prefix_len) for _ in range(num_prefixes)]
    return [Sample(prefixes[i] + vocabulary.random_ids(rng, suffix_len), total, output_len) for i in choices]
