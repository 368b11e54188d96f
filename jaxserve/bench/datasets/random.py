"""Random tokens: nothing to share, nothing to guess."""

import numpy as np

from jaxserve.bench.datasets.lengths import Lengths
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample


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
    """`n` prompts of random tokens; the same `prefix_len` tokens, on top of `input_len`, begin all of them."""
    inputs, outputs = input_len.sample(rng, n).tolist(), output_len.sample(rng, n).tolist()
    if as_text:
        head = vocabulary.text_of_length(rng, prefix_len)[0] if prefix_len else ""
        texts = [vocabulary.text_of_length(rng, prefix_len + length, head=head) for length in inputs]
        return [Sample(text, count, output) for (text, count), output in zip(texts, outputs, strict=True)]
    prefix = vocabulary.random_ids(rng, prefix_len)
    prompts = [prefix + vocabulary.random_ids(rng, length) for length in inputs]
    return [Sample(prompt, len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
