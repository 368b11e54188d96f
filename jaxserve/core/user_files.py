"""Python files of users, such as policies and parsers of their own, which are executed."""

import importlib.util
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType

RAISED = (Exception, SystemExit)  # what a user's code may raise, except an interrupt of the keyboard


def user_module(path: Path) -> ModuleType:
    """Execute a file whose name ends with .py, and return it as a module. Raise what it raises.

    It runs once, however often it is asked for, until it is modified.
    """
    return _executed(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _executed(path: Path, modified: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert spec is not None, "the file's name ends with .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module that defines them
    spec.loader.exec_module(module)
    return module


def place_of(error: BaseException, path: Path) -> str:
    """Return the line of a user's file where an error arose as "FILE.py:LINE", or only the file if that is unknown."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    if isinstance(error, SyntaxError) and error.filename == str(path.resolve()):
        lines.insert(0, error.lineno)
    return f"{path}:{lines[0]}" if lines and lines[0] is not None else str(path)


def said(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}".splitlines()[0]
