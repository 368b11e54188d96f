"""Loading of policies: by name with settings, from a YAML file, or from a user's Python file."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any

from jaxserve.control.plan import Plan
from jaxserve.control.policies.fixed import ManualPolicy, StaticPolicy
from jaxserve.control.policies.morph import MorphPolicy
from jaxserve.control.policies.morph_settings import ACCURACY, INT8, PERFORMANCE, MorphSettings
from jaxserve.control.policies.param_drop import DropSettings, ParamDropPolicy
from jaxserve.control.policies.quality import QualityLoss
from jaxserve.control.policies.tp_transform import TransformPolicy, TransformSettings
from jaxserve.control.policy import Policy, chain, errors_of_policy
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml, read_text
from jaxserve.core.precision import BITS
from jaxserve.core.user_files import RAISED, place_of, said, user_module

Settings = MorphSettings | TransformSettings | DropSettings

MORPH_MODES = {"morph": ACCURACY, "morph-int8": INT8, "morph-performance": PERFORMANCE}
TRANSFORM, DROP = "tp_transform", "param_drop"
# Settings by policy.
DEFAULTS: dict[str, Settings] = {**MORPH_MODES, TRANSFORM: TransformSettings(), DROP: DropSettings()}
POLICY_NAMES = ("static", "manual", *DEFAULTS)
AND = "+"  # between the parts of a chain
YAML_SUFFIXES = (".yaml", ".yml")


def load_policy(
    source: str | Path,
    resources: Resources,
    swap_order: Sequence[int],
    *,
    settings: Mapping[str, Any] | None = None,
    target: Plan | None = None,
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    max_quality_loss: float | None = None,
    loss: QualityLoss | None = None,
) -> Policy:
    """Return the policy that `source` names: one of `POLICY_NAMES`, a YAML file, or "FILE.py:NAME".

    Several of them with "+" in between are a chain, as `policy.chain` makes it. A YAML file names a policy (`policy`)
    and, if it has any, the settings that differ from its own (`settings`). NAME in a Python file is called with
    `resources` and `swap_order`, and returns a policy. The file is executed, so use only files that you trust.

    `swap_order` has the layers in the order in which they may lose precision, the least important first. `settings` are
    those of a policy that is given by its name. `target` is the manual policy's plan. `slo_ttft` (s), `slo_tpot` (s)
    and `max_quality_loss` (share of the cross-entropy, of which `loss` is the estimate) override what a mode or a file
    says, but not `settings`. Without `loss`, no floor of quality is held. A chain has no settings of its own.

    Raise `ConfigError` if `source` or a setting is not valid, if layers cannot have the precisions that the policy
    needs, or if the user's code raises.
    """
    if len(parts := str(source).split(AND)) > 1:
        return _chain(
            parts,
            settings,
            lambda part: load_policy(
                part,
                resources,
                swap_order,
                slo_ttft=slo_ttft,
                slo_tpot=slo_tpot,
                max_quality_loss=max_quality_loss if _has_quality(part) else None,
                loss=loss,
            ),
        )
    given = {"slo_ttft": slo_ttft, "slo_tpot": slo_tpot, "max_quality_loss": max_quality_loss}
    objectives: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    text = str(source)
    if python := _python_source(text):
        if max_quality_loss is not None:
            raise ConfigError(f"max_quality_loss has no effect on {text}: choose one of {', '.join(MORPH_MODES)}")
        policy = _from_python(*python, resources, swap_order)
        _check_precisions(_declared(policy, f"policy {text}"), resources, swap_order, text)
        return policy
    name, chosen = _named(text, settings)
    if name == "static":
        return StaticPolicy()
    if name == "manual":
        return ManualPolicy(target)
    if isinstance(chosen, TransformSettings):
        return TransformPolicy(resources, chosen)
    if isinstance(chosen, DropSettings):
        return ParamDropPolicy(resources, chosen)
    assert chosen is not None, "every other policy is a mode of morph"
    chosen = replace(chosen, **{key: value for key, value in objectives.items() if key not in (settings or {})})
    _check_precisions(chosen.precisions, resources, swap_order, text, changed=settings is not None)
    return MorphPolicy(resources, swap_order, chosen, name=name, loss=loss)


def precisions_of(source: str | Path) -> tuple[str, ...] | None:
    """Return the precisions that a policy needs besides those of the start; None if it does not say.

    They are () for a policy that never changes a layer.

    A policy of a Python file says it by an attribute `precisions` of what the file defines. A subclass of `MorphPolicy`
    needs by default what accuracy mode does.

    Raise `ConfigError` if `source` is not valid.
    """
    text = str(source)
    if len(parts := text.split(AND)) > 1:
        each = [precisions_of(part) for part in parts]
        return None if None in each else tuple(dict.fromkeys(name for needed in each for name in needed or ()))
    if python := _python_source(text):
        path, name = python
        made = _defined(path, name)
        if inspect.isclass(made) and isinstance(inspect.getattr_static(made, "precisions", None), property):
            return ACCURACY.precisions if issubclass(made, MorphPolicy) else None
        return _declared(made, f"policy {text}") or None
    name, settings = _named(text, None)
    if isinstance(settings, MorphSettings):
        return settings.precisions
    return None if name == "manual" else ()


def drops_layers(source: str | Path) -> bool:
    """Return whether a built-in policy lets instances share their layers. Raise `ConfigError` if it is not valid."""
    parts = str(source).split(AND)
    return any(_python_source(part) is None and isinstance(_named(part, None)[1], DropSettings) for part in parts)


def read_policy_file(path: Path) -> dict[str, Any]:
    """Return the keys of a YAML file: `policy`, one of `POLICY_NAMES`, and `settings`, a mapping or None.

    Raise `ConfigError` that names the file if it is not valid.
    """
    value = parse_yaml(read_text(path), f"policy {path}")
    if not isinstance(value, dict) or value.get("policy") not in POLICY_NAMES or value.keys() - {"policy", "settings"}:
        raise ConfigError(
            f"policy {path}: it must have the key policy, which is one of {', '.join(POLICY_NAMES)}, "
            "and may have the key settings"
        )
    return {"policy": value["policy"], "settings": value.get("settings")}


# -- policies by name


def _chain(parts: Sequence[str], settings: Mapping[str, Any] | None, load: Callable[[str], Policy]) -> Policy:
    """Return the chain of the policies that its parts name."""
    text = AND.join(parts)
    if settings is not None:
        raise ConfigError(f"policy {text} is a chain, which has no settings: give a .yaml file for a part of it")
    if alone := next((part for part in parts if part in ("static", "manual", "")), None):
        raise ConfigError(f"policy {text}: {alone!r} cannot be a part of a chain")
    return chain(*map(load, parts))


def _has_quality(source: str) -> bool:
    """Return whether a policy knows a floor of quality."""
    return _python_source(source) is None and isinstance(_named(source, None)[1], MorphSettings)


def _named(source: str, settings: Mapping[str, Any] | None) -> tuple[str, Settings | None]:
    """Return a policy's name and its settings, which are None for a policy without settings."""
    if source in POLICY_NAMES:
        return source, _settings(f"policy {source}", source, settings)
    if not source.endswith(YAML_SUFFIXES):
        raise ConfigError(
            f"policy is {source!r}: choose from {', '.join(POLICY_NAMES)}, or give a .yaml file or FILE.py:NAME"
        )
    value = read_policy_file(Path(source))
    return value["policy"], _settings(f"policy {source}", value["policy"], value["settings"])


def _settings(where: str, name: str, given: Any) -> Settings | None:
    """Return a policy's settings, changed by those that are given. None as a value means infinity, i.e. no limit."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: settings is {given!r}: it must be a mapping of names to values")
    if name not in DEFAULTS:
        if given:
            raise ConfigError(f"{where}: {name} has no settings")
        return None
    defaults = DEFAULTS[name]
    known = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown setting {key!r}: choose from {', '.join(known)}")
        value = inf if value is None and known[key] is float else value
        kinds = (int, float) if known[key] is float else (known[key],)
        if not isinstance(value, kinds) or (isinstance(value, bool) and known[key] is not bool):
            raise ConfigError(f"{where}: settings.{key} is {value!r}: it must be of type {known[key].__name__}")
        changes[key] = value
    try:
        return replace(defaults, **changes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_precisions(
    needed: Sequence[str], resources: Resources, swap_order: Sequence[int], policy: str, *, changed: bool = False
) -> None:
    """Raise `ConfigError` if a layer cannot have a precision that a policy needs, with settings that are `changed`."""
    ready = [set(resources.precisions(layer_name(layer))) for layer in swap_order]
    missing = [precision for precision in needed if any(precision not in known for known in ready)]
    if missing:
        variants = " ".join(f"--variant {precision}" for precision in missing)
        advice = variants if changed else f"--policy {policy}, or with {variants}"
        raise ConfigError(
            f"policy {policy} changes layers to {', '.join(needed)}, but the engine was started without "
            f"{', '.join(missing)}: start it with {advice}"
        )


# -- policies of a user's own


def _python_source(source: str) -> tuple[Path, str] | None:
    """Return the file and the name of "FILE.py:NAME", or None for other sources."""
    file, colon, name = source.rpartition(":")
    return (Path(file), name) if colon and file.endswith(".py") else None


def _from_python(path: Path, name: str, resources: Resources, swap_order: Sequence[int]) -> Policy:
    made = _defined(path, name)
    with _errors_of_file(path, f": {name}(resources, swap_order)"):
        policy: Policy = made(resources, swap_order)
    _check_protocol(policy, f"policy {path}: what {name} returns")
    return policy


def _defined(path: Path, name: str) -> Any:
    """Return what a Python file defines under a name."""
    if not path.is_file():
        raise ConfigError(f"policy {path}: the file does not exist")
    with _errors_of_file(path):
        module = user_module(path)
    if not hasattr(module, name):
        raise ConfigError(f"policy {path}: the file defines no {name}")
    return getattr(module, name)


@contextmanager
def _errors_of_file(path: Path, what: str = "") -> Iterator[None]:
    """Turn every error of a user's file in a `with` block into a `ConfigError` that names the file and the line."""
    try:
        yield
    except ConfigError:
        raise
    except RAISED as error:
        raise ConfigError(f"policy {place_of(error, path)}{what} raised {said(error)}") from error


def _declared(policy: object, what: str) -> tuple[str, ...]:
    """Return the attribute `precisions`, () if there is none. Raise `ConfigError` if it does not name precisions."""
    with errors_of_policy(f"{what}: precisions"):
        value = getattr(policy, "precisions", ())
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) and name in BITS for name in value):
        raise ConfigError(f'{what}: precisions is {value!r}: it must be a tuple of {", ".join(BITS)}, as ("int8",)')
    return tuple(value)


def _check_protocol(policy: object, what: str) -> None:
    """Raise `ConfigError` if an object does not implement `Policy`."""
    if not isinstance(getattr(policy, "name", None), str):
        raise ConfigError(f"{what} has no `name` that is a string: a policy has name, init and update")
    for method, names in (("init", ("plan",)), ("update", ("snapshot", "plan", "state"))):
        function = getattr(policy, method, None)
        if not callable(function):
            raise ConfigError(f"{what} has no method {method}: a policy has name, init and update")
        wanted = f"{what} has a method {method} that cannot be called with ({', '.join(names)})"
        try:
            signature = inspect.signature(function)
            signature.bind(*names)
        except TypeError as error:
            raise ConfigError(f"{wanted}: {error}") from error
        if next(iter(signature.parameters)) == "snapshots":
            raise ConfigError(
                f"{wanted}: its first parameter is `snapshots`, those of all instances, but a policy decides for one "
                "instance now: it gets the snapshot and the plan of that instance"
            )
