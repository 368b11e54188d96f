"""Sensitivity profiles: the order in which to quantise a model's layers. Importing this package loads no JAX."""

from jaxserve.calibration.sensitivity.profile import SensitivityProfile

__all__ = ["SensitivityProfile"]
