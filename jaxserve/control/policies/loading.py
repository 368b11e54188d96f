"""Loading of policies: by name, from a YAML file with settings, or from a user's Python file."""

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxserve.control.plan import Plan
from jaxserve.control.policies.fixed import ManualPolicy, StaticPolicy
from jaxserve.control.policies.morph import MorphPolicy
from jaxserve.control.policies.morph_settings import ACCURACY, INT8, PERFORMANCE, MorphSettings
from jaxserve.control.policy import Policy
from jaxserve.control.resources import Resources
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml, read_text

MORPH_MODES = {"morph": ACCURACY, "morph-int8": INT8, "morph-performance": PERFORMANCE}
POLICY_NAMES = ("static", "manual", *MORPH_MODES)


def load_policy(
    source: str | Path,
    resources: Resources,
    swap_order: Sequence[int],
    *,
    target: Plan | None = None,
    slo_ttft: float | None = None,
) -> Policy:
    """Return the policy that `source` names: one of `POLICY_NAMES`, a YAML file, or "FILE.py:NAME".

    A YAML file names a policy (`policy`) and, for morph, the settings that differ from its mode's (`settings`). NAME in
    a Python file is called with `resources` and `swap_order`, and returns a policy. The file is executed, so use only
    files that you trust.

    `swap_order` has the layers in the order in which they may lose precision, the least important first. `target` is
    the manual policy's plan. `slo_ttft` (s) overrides the settings.

    Raise `ConfigError` if `source` or a setting is not valid, or if the user's code raises.
    """

    def make(name: str, settings: MorphSettings | None = None) -> Policy:
        if name == "static":
            return StaticPolicy()
        if name == "manual":
            return ManualPolicy(target)
        settings = settings or MORPH_MODES[name]
        if slo_ttft is not None:
            settings = replace(settings, slo_ttft=slo_ttft)
        return MorphPolicy(resources, swap_order, settings, name=name)

    text = str(source)
    if text in POLICY_NAMES:
        return make(text)
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_python(Path(file), name, resources, swap_order)
    if not text.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"policy is {text!r}: choose from {', '.join(POLICY_NAMES)}, or give a .yaml file or FILE.py:NAME"
        )
    return make(*_from_yaml(Path(text)))


def settings_of(source: str | Path) -> MorphSettings | None:
    """Return the settings of a morph policy, given by its name or YAML file; None for other policies.

    Raise `ConfigError` if the YAML file is not valid.
    """
    text = str(source)
    if text.endswith((".yaml", ".yml")):
        _, settings = _from_yaml(Path(text))
        return settings
    return MORPH_MODES.get(text)


def _from_yaml(path: Path) -> tuple[str, MorphSettings | None]:
    """Return the name of the policy in a YAML file, and its settings (None unless it is a morph policy)."""
    value = parse_yaml(read_text(path), f"policy {path}")
    if not isinstance(value, dict) or value.get("policy") not in POLICY_NAMES or value.keys() - {"policy", "settings"}:
        raise ConfigError(
            f"policy {path}: it must have the key policy, which is one of {', '.join(POLICY_NAMES)}, "
            "and may have the key settings"
        )
    name, settings = value["policy"], value.get("settings") or {}
    if name in MORPH_MODES:
        return name, _settings(path, MORPH_MODES[name], settings)
    if settings:
        raise ConfigError(f"policy {path}: {name} has no settings")
    return name, None


def _settings(path: Path, defaults: MorphSettings, given: Any) -> MorphSettings:
    """Return the default settings, changed by those given in a file."""
    known = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
    if not isinstance(given, dict):
        raise ConfigError(f"policy {path}: settings is {given!r}: it must be a mapping of names to values")
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"policy {path}: unknown setting {name!r}: choose from {', '.join(known)}")
        kinds = (int, float) if known[name] is float else known[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and known[name] is not bool):
            raise ConfigError(f"policy {path}: settings.{name} is {value!r}: it must be of type {known[name].__name__}")
    return replace(defaults, **given)


def _from_python(path: Path, name: str, resources: Resources, swap_order: Sequence[int]) -> Policy:
    spec = importlib.util.spec_from_file_location(f"jaxserve_policy_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"policy {path}: the file does not exist")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module that defines them.
    sys.modules[spec.name] = module
    with _errors_as_config_errors(f"policy {path}"):
        spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ConfigError(f"policy {path}: the file defines no {name}")
    with _errors_as_config_errors(f"policy {path}: {name}(resources, swap_order)"):
        policy: Policy = getattr(module, name)(resources, swap_order)
    _check_protocol(policy, f"policy {path}: what {name} returns")
    return policy


@contextmanager
def _errors_as_config_errors(what: str) -> Iterator[None]:
    """Turn every error of a user's code into a `ConfigError` that says `what` raised it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error


def _check_protocol(policy: object, what: str) -> None:
    """Raise `ConfigError` if an object does not implement `Policy`."""
    if not isinstance(getattr(policy, "name", None), str):
        raise ConfigError(f"{what} has no `name` that is a string: a policy has name, init and update")
    for method, arguments in (("init", (None,)), ("update", (None,) * 3)):
        function = getattr(policy, method, None)
        if not callable(function):
            raise ConfigError(f"{what} has no method {method}: a policy has name, init and update")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            wanted = {"init": "(plan)", "update": "(snapshot, plan, state)"}[method]
            raise ConfigError(f"{what} has a method {method} that cannot be called with {wanted}: {error}") from error
