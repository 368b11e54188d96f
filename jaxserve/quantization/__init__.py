"""Weights in fewer bits: the format (`qarray`), how weights are brought into it, and how others' formats are read.

`QArray` is loaded when it is asked for, so that the command line can be described without JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.quantization.qarray import QArray

__all__ = ["QArray"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxserve.quantization.qarray import QArray

    return QArray
