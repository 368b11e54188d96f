"""Names of a model's blocks: "embed", "layers.0", "layers.1", ..., "head"."""

EMBED, HEAD = "embed", "head"
_LAYER = "layers."


def layer_name(index: int) -> str:
    """Return the name of a decoder layer."""
    return f"{_LAYER}{index}"


def is_layer(block: str) -> bool:
    """Return whether a block is a decoder layer."""
    return block.startswith(_LAYER)


def layer_index(block: str) -> int:
    """Return the index of a decoder layer from its name."""
    return int(block.removeprefix(_LAYER))
