"""XLA gets one thread, and compiles quickly, where native kernels do all products on a small machine.

Everywhere else its settings stay unchanged.
"""

import os
from dataclasses import replace

import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig, MoEConfig
from jaxserve.kernels.native import library
from jaxserve.planning import resolve as resolution
from tests.support.internals import choose_devices

DENSE = open_checkpoint(bundled_model_path()).config
EXPERTS = replace(DENSE, moe=MoEConfig(4, 2, 64, True, (True,) * DENSE.num_layers))


def asked(
    monkeypatch, config: EngineConfig, model, variants: tuple[str, ...], flags: str = "--xla_dump_to=there"
) -> tuple[str | None, str]:
    """Return the requested number of threads and the flags, on a machine of two processors with these kernels."""
    environment = {name: value for name, value in os.environ.items() if name != resolution.XLA_THREADS}
    environment["XLA_FLAGS"] = flags
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(library, "variants", lambda: variants)
    monkeypatch.setattr(resolution, "processors", lambda: 2)
    choose_devices(config, model)
    return environment.get(resolution.XLA_THREADS), environment["XLA_FLAGS"]


@pytest.mark.parametrize("variants", [("amx", "vnni"), ("avx2few", "avx2", "portable")])
def test_dense_bfloat16_model_on_native_kernels_leaves_xla_one_thread(monkeypatch, variants):
    assert asked(monkeypatch, EngineConfig(), DENSE, variants) == (
        "1",
        " ".join(("--xla_dump_to=there", *resolution.QUICK_COMPILATION)),
    )


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
@pytest.mark.parametrize(
    ("config", "flags", "threads"),
    [
        (EngineConfig(dp=2), "", "8"),
        (EngineConfig(virtual_devices=4), "", "16"),
        (EngineConfig(tp=2), "--xla_force_host_platform_device_count=8", "32"),
    ],
)
def test_several_devices_get_four_threads_each(monkeypatch, config, model, flags, threads):
    assert asked(monkeypatch, config, model, ("amx",), flags)[0] == threads


@pytest.mark.parametrize(
    "given", [" ".join(flag.partition("=")[0] + "=given" for flag in resolution.QUICK_COMPILATION), "a/file"]
)
def test_given_xla_flags_are_kept(monkeypatch, given):
    assert asked(monkeypatch, EngineConfig(), DENSE, ("amx",), given) == ("1", given)


@pytest.mark.parametrize(
    ("config", "model", "variants"),
    [
        (EngineConfig(kernel_backend="xla"), DENSE, ("amx",)),
        (EngineConfig(), replace(DENSE, dtype="float32"), ("amx",)),
        (EngineConfig(), EXPERTS, ("amx",)),
        (EngineConfig(), DENSE, ("avx512", "avx2few", "avx2")),
        (EngineConfig(), DENSE, ()),
    ],
    ids=["xla", "float32", "experts", "xla-is-faster", "no-kernels"],
)
def test_model_that_xla_multiplies_keeps_its_threads(monkeypatch, config, model, variants):
    assert asked(monkeypatch, config, model, variants) == (None, "--xla_dump_to=there")
