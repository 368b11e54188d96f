"""Token streams: documents in a new order every epoch, cut into windows of equal length."""

from collections.abc import Iterator, Sequence

import numpy as np
from corpus import Document
from tokenizers import Tokenizer

SOURCE_PASSES = 3  # passes over modules and documentation for each pass over CPython's tests


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Return the tokens (uint16) of each document, starting with the end-of-text token."""
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return [np.asarray(encoding.ids, np.uint16) for encoding in encodings]


def repeat_sources(documents: Sequence[Document], tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the documents of one epoch: tests once, everything else `SOURCE_PASSES` times."""
    passes = [1 if document.is_test else SOURCE_PASSES for document in documents]
    return [text for text, count in zip(tokens, passes, strict=True) for _ in range(count)]


def windows(texts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Concatenate texts and cut them into windows, int32 [N, length + 1].

    Neighbouring windows share a token. A remainder that does not fill a window is dropped.
    """
    stream = np.concatenate(texts)
    count = (len(stream) - 1) // length
    starts = np.arange(count)[:, None] * length
    return stream[starts + np.arange(length + 1)].astype(np.int32)


def batches(texts: Sequence[np.ndarray], batch: int, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield batches, int32 [batch, length + 1], forever; every epoch has a new order of documents and windows."""
    while True:
        rows = windows([texts[i] for i in rng.permutation(len(texts))], length)
        rng.shuffle(rows)
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[start : start + batch]
