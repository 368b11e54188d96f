"""Native CPU kernels behind XLA custom calls. Built by `python -m jaxserve.kernels.native.build`; absent otherwise."""

from jaxserve.kernels.native.attention import paged_attention, supports
from jaxserve.kernels.native.library import available

__all__ = ["available", "paged_attention", "supports"]
