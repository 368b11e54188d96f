"""Native CPU kernels as XLA custom calls, compiled at installation or by `python -m jaxserve.kernels.native`."""

from jaxserve.kernels.native.attention import paged_attention, write_and_attend
from jaxserve.kernels.native.kv import kv_write
from jaxserve.kernels.native.library import multiplies_all, targets, variants
from jaxserve.kernels.native.rounding import quantize_by_search

__all__ = [
    "kv_write",
    "multiplies_all",
    "paged_attention",
    "quantize_by_search",
    "targets",
    "variants",
    "write_and_attend",
]
