"""Quantised weights: the format (`qarray`), rounding to it, and decoders for the formats of other tools.

`QArray` is imported at first use, because the help texts of the command line must not load JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.quantization.qarray import QArray

__all__ = ["QArray"]

if not TYPE_CHECKING:  # type checkers would let every name pass

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from jaxserve.quantization.qarray import QArray

        return QArray
