"""Policies: static, manual, morph and tp_transform, which do not import each other."""

from jaxserve.control.policies.fixed import ManualPolicy, StaticPolicy
from jaxserve.control.policies.loading import POLICY_NAMES, load_policy, precisions_of
from jaxserve.control.policies.morph import MorphPolicy
from jaxserve.control.policies.morph_settings import ACCURACY, INT8, PERFORMANCE, MorphSettings
from jaxserve.control.policies.quality import QualityLoss
from jaxserve.control.policies.tp_transform import TransformPolicy, TransformSettings

__all__ = [
    "ACCURACY",
    "INT8",
    "PERFORMANCE",
    "POLICY_NAMES",
    "ManualPolicy",
    "MorphPolicy",
    "MorphSettings",
    "QualityLoss",
    "StaticPolicy",
    "TransformPolicy",
    "TransformSettings",
    "load_policy",
    "precisions_of",
]
