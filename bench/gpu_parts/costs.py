"""The fewest bytes and operations of a computation: what its floor is made of.

Bytes: every input read once and every output written once. Operations: two for each multiplication with its addition.
"""

from dataclasses import dataclass

from bench.gpu_parts.sizes import Model

WORD = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Cost:
    """Bytes of device memory moved, and operations of which dtype."""

    bytes: int
    flops: int
    dtype: str = "bfloat16"

    @property
    def fields(self) -> dict[str, int | str]:
        """As part of a row."""
        return {"bytes": self.bytes, "flops": self.flops, "dtype": self.dtype}


def layer_weights(model: Model) -> int:
    """Parameters of one decoder layer that take part in products."""
    s = model.shape
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    return attention + 3 * s.hidden * s.intermediate


def token_bytes(model: Model) -> int:
    """Bytes of one token's keys and values in one layer."""
    return 2 * model.shape.kv_heads * model.shape.head_dim * WORD


def decode(model: Model, batch: int, context: int, layer_bytes: int | None = None) -> Cost:
    """One decode step of `batch` sequences, each with a context of so many tokens.

    `layer_bytes`: of the weights of all layers, where they are not in bfloat16.
    """
    s = model.shape
    layers, head = s.layers * layer_weights(model), s.hidden * s.vocab
    weights = layers + head
    read = (layers * WORD if layer_bytes is None else layer_bytes) + head * WORD
    attention = 4 * s.layers * s.heads * s.head_dim * context  # scores and weighted values, per sequence
    kv = batch * (context + 1) * s.layers * token_bytes(model)
    return Cost(read + kv, batch * (2 * weights + attention))


def prefill(model: Model, prompts: int, length: int) -> Cost:
    """The prompts of so many sequences, with logits for the last token of each."""
    s = model.shape
    layers, head = s.layers * layer_weights(model), s.hidden * s.vocab
    attention = 4 * s.layers * s.heads * s.head_dim * seen(length)
    kv = 2 * prompts * length * s.layers * token_bytes(model)  # written and read
    flops = prompts * (length * 2 * layers + 2 * head + attention)
    return Cost((layers + head) * WORD + kv, flops)


def seen(length: int) -> int:
    """Pairs of a token and one that it sees, itself included, in a sequence of so many tokens."""
    return length * (length + 1) // 2
