"""The text that stands for an engine where its name alone is evaluated, as in a notebook."""

from collections.abc import Sequence

from jaxserve.engine.client import ModelInfo
from jaxserve.telemetry import Snapshot
from jaxserve.telemetry.snapshot import combine


def engine_repr(kind: str, info: ModelInfo, snapshots: Sequence[Snapshot], *, closed: bool) -> str:
    """Return a text such as "<LLM 'tiny', layers: 8 bfloat16, context: 2,048 tokens, KV pages: 129>"."""
    if closed:
        return f"<{kind} {info.name!r}: closed>"
    whole = combine(snapshots)
    context, pages = f"context: {info.max_model_len:,} tokens", f"KV pages: {whole.kv_pages_total:,}"
    parts = [f"layers: {whole.layers_text}", context, pages]
    if len(snapshots) > 1:
        parts.append(f"instances: {len(snapshots)}")
    return f"<{kind} {info.name!r}, {', '.join(parts)}>"
