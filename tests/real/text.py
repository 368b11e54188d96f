"""English text that is at hand without a network: the reference of the Python language, which every interpreter has."""

import pydoc_data.topics as reference

import numpy as np

from jaxserve.engine.tokenizer import Tokenizer

TOPICS = ("attribute-access", "exceptions", "naming", "objects", "strings", "compound", "import", "types")


def rows(tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
    """Return the first tokens of the text, int32 [count, length]."""
    text = "\n\n".join(reference.topics[name] for name in TOPICS)
    return np.array(tokenizer.encode(text)[: count * length], np.int32).reshape(count, length)
