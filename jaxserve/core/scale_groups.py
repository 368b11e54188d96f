"""Groups of a quantised weight's inputs that share a scale: their sizes, and sentences about them.

Kernels multiply whole units of 128 codes fastest, and groups of 128 need the fewest bytes: layers all of whose weights
they divide have them. Other layers, which small models have, take groups of 32 in 4 and 3 bits: these lose much less
in quality than 64, and also in the weights that 128 would divide. In 8 bits the group hardly matters for quality.
"""

from collections.abc import Iterable, Mapping

GROUPS = (128, 64, 32)
GROUP = GROUPS[0]


def default_group(inputs: Iterable[int], bits: int) -> int:
    """Return the group to take where it divides, for a layer whose weights of 8, 4 or 3 bits have these inputs."""
    return GROUP if bits == 8 or all(size % GROUP == 0 for size in inputs) else GROUPS[-1]


def group_size(size: int, wanted: int = GROUP) -> int:
    """Return how many of a weight's `size` inputs share a scale.

    That is `wanted`, where 0 means all inputs, or the largest of `GROUPS` below it that divides `size`. It is `size` if
    none does.
    """
    if wanted in (0, size):
        return size
    return next((group for group in (wanted, *GROUPS) if group <= wanted and size % group == 0), size)


def sentence(groups: Mapping[str, tuple[int, int]], wanted: int = GROUP) -> str:
    """Return a sentence on the (inputs, inputs of a group) of a layer's weights, by name.

    It ends with the inputs that groups of `wanted` do not divide: "a scale for 64 inputs of qkv, for 128 of down: 128
    does not divide 576".
    """
    names: dict[int, list[str]] = {}
    for name, (_, group) in groups.items():
        names.setdefault(group, []).append(name.rpartition(".")[2])
    first, *others = (f"{group} inputs of {', '.join(of_group)}" for group, of_group in names.items())
    text = "".join(["a scale for ", first, *(f", for {part}" for part in others)])
    odd = sorted({str(size) for size, _ in groups.values() if wanted and size % wanted})
    return f"{text}: {wanted} does not divide {' and '.join(odd)}" if odd else text
