"""The fewest bytes and operations of a computation, from which its floor follows.

Bytes: every input is read once and every output written once. Operations: two for each multiplication with its
addition.
"""

from dataclasses import dataclass

from bench.gpu_parts.sizes import Model

WORD = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Cost:
    """Bytes of device memory moved, operations, and the dtype of the operations."""

    bytes: int
    flops: int
    dtype: str = "bfloat16"

    @property
    def fields(self) -> dict[str, int | str]:
        """The cost as fields of a row."""
        return {"bytes": self.bytes, "flops": self.flops, "dtype": self.dtype}


def layer_weights(model: Model) -> int:
    """Return the number of parameters in the products of one decoder layer."""
    s = model.shape
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    return attention + 3 * s.hidden * s.intermediate


def token_bytes(model: Model) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    return 2 * model.shape.kv_heads * model.shape.head_dim * WORD


def decode(model: Model, batch: int, context: int, layer_bytes: int | None = None) -> Cost:
    """Return the cost of one decode step of `batch` sequences with contexts of `context` tokens.

    `layer_bytes` is the size of all layers' weights, by default in bfloat16.
    """
    s = model.shape
    layers, head = s.layers * layer_weights(model), s.hidden * s.vocab
    weights = layers + head
    read = (layers * WORD if layer_bytes is None else layer_bytes) + head * WORD
    attention = 4 * s.layers * s.heads * s.head_dim * context  # scores and weighted values, per sequence
    kv = batch * (context + 1) * s.layers * token_bytes(model)
    return Cost(read + kv, batch * (2 * weights + attention))


def prefill(model: Model, prompts: int, length: int) -> Cost:
    """Return the cost of prefilling `prompts` prompts of `length` tokens, with logits for the last token of each."""
    s = model.shape
    layers, head = s.layers * layer_weights(model), s.hidden * s.vocab
    attention = 4 * s.layers * s.heads * s.head_dim * attended_pairs(length)
    kv = 2 * prompts * length * s.layers * token_bytes(model)  # written and read
    flops = prompts * (length * 2 * layers + 2 * head + attention)
    return Cost((layers + head) * WORD + kv, flops)


def attended_pairs(length: int) -> int:
    """Return the number of pairs of a token and a token that it attends to, itself included, in a sequence."""
    return length * (length + 1) // 2
