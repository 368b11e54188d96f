"""Extras: packages that only some commands need, and that `pip install jaxserve` therefore leaves out."""

from importlib.util import find_spec

from jaxserve.core.errors import ConfigError


def require_extra(extra: str, *packages: str, purpose: str) -> None:
    """Raise `ConfigError` with the line that installs them, if one of an extra's packages is not installed.

    `purpose` is what needs them, such as "the load client". Nothing is imported.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f'{purpose} needs {" and ".join(missing)}, which {verb} not installed: pip install "jaxserve[{extra}]"'
        )
