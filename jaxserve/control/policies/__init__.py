"""Policies: static, manual, morph, tp_transform and param_drop, which do not import each other."""

from jaxserve.control.policies.fixed import ManualPolicy, StaticPolicy
from jaxserve.control.policies.loading import POLICY_NAMES, drops_layers, load_policy, precisions_of
from jaxserve.control.policies.morph import MorphPolicy
from jaxserve.control.policies.morph_settings import ACCURACY, INT8, PERFORMANCE, MorphSettings
from jaxserve.control.policies.param_drop import DropSettings, ParamDropPolicy
from jaxserve.control.policies.quality import QualityLoss
from jaxserve.control.policies.tp_transform import TransformPolicy, TransformSettings

__all__ = [
    "ACCURACY",
    "INT8",
    "PERFORMANCE",
    "POLICY_NAMES",
    "DropSettings",
    "ManualPolicy",
    "MorphPolicy",
    "MorphSettings",
    "ParamDropPolicy",
    "QualityLoss",
    "StaticPolicy",
    "TransformPolicy",
    "TransformSettings",
    "drops_layers",
    "load_policy",
    "precisions_of",
]
