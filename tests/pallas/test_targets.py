"""What compiling GPU kernels needs on this machine."""

import importlib.util

from pallas_kernels.targets import missing


def test_missing_without_cuda_plugin_or_ptxas_names_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "plugin" in missing()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "ptxas" in missing()
