"""Texts in the reasons of the morph policy."""

from collections.abc import Callable, Sequence

from jaxserve.control.plan import InstancePlan


def change_text(before: InstancePlan, after: InstancePlan, loss: Callable[[Sequence[str]], float] | None = None) -> str:
    """Return what a decision changes, as a text such as "layers 3, 7 to int4: +1.2 % loss, KV 800 -> 960 pages".

    `loss` returns the expected rise of the cross-entropy for precisions of all layers, as a share.
    """
    layers: dict[str, list[str]] = {}
    for old, new in zip(before.blocks, after.blocks, strict=True):
        if old.precision != new.precision:
            layers.setdefault(new.precision, []).append(new.block.removeprefix("layers."))
    parts = [f"layer{'s' if len(n) > 1 else ''} {', '.join(n)} to {precision}" for precision, n in layers.items()]
    if parts and loss is not None:
        parts[-1] += f": {loss(after.layer_precisions) - loss(before.layer_precisions):+.1%} loss".replace("%", " %")
    if before.kv_pages != after.kv_pages:
        parts.append(f"KV {before.kv_pages} -> {after.kv_pages} pages")
    if before.max_num_seqs != after.max_num_seqs:
        limits = ("all" if n is None else n for n in (before.max_num_seqs, after.max_num_seqs))
        parts.append("at most {} -> {} sequences at once".format(*limits))
    return ", ".join(parts)


def ms(seconds: float) -> str:
    """Return a time as a text in milliseconds."""
    return f"{seconds * 1e3:.0f} ms"
