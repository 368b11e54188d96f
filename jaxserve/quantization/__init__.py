"""Weights in fewer bits: the format (`qarray`), and how weights are brought into it."""

from jaxserve.quantization.qarray import QArray

__all__ = ["QArray"]
