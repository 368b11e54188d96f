"""A folder for compiled programs that is missing or read-only costs time alone, and the warning says what helps."""

import os
from math import inf
from pathlib import Path

import jax
import pytest

from jaxserve.compilation.cache import keeps_executables, use_persistent_cache


@pytest.fixture(autouse=True)
def same_settings_afterwards():
    names = [
        name for name in jax.config.values if name.startswith(("jax_compilation_cache_dir", "jax_persistent_cache"))
    ]
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("home", ["/proc", None], ids=["read-only", "no home"])
def test_missing_folder_names_the_option(home: str | None, monkeypatch, caplog) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home if home is None else lambda: Path(home))
    use_persistent_cache(None)
    assert "compiled at every start" in caplog.text
    assert "--compile-cache or XDG_CACHE_HOME" in caplog.text


@pytest.mark.parametrize("writable", [True, False])
def test_read_only_folder_is_read_but_not_written(writable: bool, tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    use_persistent_cache(tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == (0.0 if writable else inf)
    assert keeps_executables() == writable
    assert ("--compile-cache" in caplog.text) == (not writable)
