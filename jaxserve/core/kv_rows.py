"""How long a row of a KV pool in int8 is: a token's key or value of one head. `kernels.kv` says what is in it."""

SCALE_BYTES = 4
COPIED_BYTES = 16  # a GPU's bulk copy engine takes multiples of it


def int8_row(head_dim: int, platform: str) -> int:
    """Bytes on a platform ("cpu", "gpu", ...): codes and their scale, but for CPU filled up."""
    size = head_dim + SCALE_BYTES
    return size if platform == "cpu" else -(-size // COPIED_BYTES) * COPIED_BYTES
