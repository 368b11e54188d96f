"""Native CPU kernels behind XLA custom calls. Built by `python -m jaxserve.kernels.native.build`; absent otherwise."""

from jaxserve.kernels.native.attention import paged_attention
from jaxserve.kernels.native.library import multiplies_all, targets, variants

__all__ = ["multiplies_all", "paged_attention", "targets", "variants"]
