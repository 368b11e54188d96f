"""Budgets above the memory are refused, and models above the budget name the options with which they fit."""

import os

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.planning import resolve as planning
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape


def simulated(hardware: str, **options):
    config = EngineConfig(**options, dp=1)
    return resolve_cluster(config, ModelShape.load("llama-3-70b"), load_hardware(hardware))


@pytest.mark.parametrize(
    ("hardware", "tp", "int4"),
    [("h100", 2, True), ("l4", 8, False), ("a100-40", 4, False)],
)
def test_model_that_is_too_large_names_options_with_which_it_fits(hardware: str, tp: int, int4: bool) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        simulated(hardware)
    message = str(refused.value)
    assert f"--tp {tp} divides it over {tp} devices" in message
    assert ("--precision int4" in message) == int4
    simulated(hardware, tp=tp)
    with pytest.raises(MemoryBudgetError, match="a larger --memory-gb") as refused:
        simulated(hardware, tp=tp // 2)
    if int4:
        simulated(hardware, precision="int4")
    else:
        with pytest.raises(MemoryBudgetError) as refused:
            simulated(hardware, precision="int4")
        assert "--precision int4" not in str(refused.value)


def test_budget_above_the_memory_of_simulated_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_gb is 4000: it must be at most 85\.521, .* \(--memory-gb\)"):
        simulated("h100", tp=2, memory_gb=4000)
    simulated("h100", tp=2, memory_gb=85)


def test_share_of_a_gpu_is_set_before_jax_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    planning._set_memory_share(0.8)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    planning._set_memory_share(0.8)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # JAX refuses to have both
    planning._set_memory_share(0.8)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize("options", [{"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": 0.9, "memory_gb": 1}])
def test_share_of_a_gpu_is_refused_on_cpu(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 0\.9: .* use memory_gb"):
        planning.resolve(EngineConfig(**options))
