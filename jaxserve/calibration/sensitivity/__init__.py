"""Which layers may be quantised first: a profile of a model, made once, read by policies. Importing it loads no JAX."""

from jaxserve.calibration.sensitivity.profile import SensitivityProfile

__all__ = ["SensitivityProfile"]
