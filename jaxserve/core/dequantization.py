"""The part of a quantised weight that XLA dequantises at once, which multiplication and planning share."""

from jaxserve.core.numeric import ceil_div, round_up

# A tile of this size stays in the L2 cache of a GPU between dequantisation and product: L4 and H100 have 48 and 50 MB.
# Smaller tiles would make products too small to occupy a large GPU.
MAX_TILE_BYTES = 32 << 20
OUTPUTS_UNIT = 128  # outputs that matrix units compute together


def outputs_by_tile(outputs: int, inputs: int, itemsize: int) -> int:
    """Return how many outputs of a weight [outputs, inputs] to dequantise at once to numbers of `itemsize` bytes.

    All of them if they take at most `MAX_TILE_BYTES`. Otherwise tiles have almost equal sizes, in whole units.
    """
    if outputs * inputs * itemsize <= MAX_TILE_BYTES:
        return outputs
    most = max(MAX_TILE_BYTES // (inputs * itemsize) // OUTPUTS_UNIT, 1) * OUTPUTS_UNIT
    return min(round_up(ceil_div(outputs, ceil_div(outputs, most)), OUTPUTS_UNIT), outputs)


def tile_bytes(outputs: int, inputs: int, itemsize: int) -> int:
    """Return the bytes of a tile of a weight [outputs, inputs] that is dequantised to numbers of `itemsize` bytes."""
    return outputs_by_tile(outputs, inputs, itemsize) * inputs * itemsize
