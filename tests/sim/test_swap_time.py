"""On a large GPU many layers change their precision in a few steps' time."""

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape

LLAMA = ModelShape.load("llama-3-8b")


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_the_swap_buffer_holds_a_change_of_many_layers(hardware: str) -> None:
    memory = resolve_cluster(EngineConfig(policy="morph-performance"), LLAMA, load_hardware(hardware)).memory
    (layer,) = {size for (_, precision), size in memory.layer_bytes.items() if precision == "int4"}
    entries = memory.ledger.entries
    assert entries["exchange"] >= 8 * layer
    assert entries["exchange"] <= 0.02 * (entries["kv"] + entries["exchange"]) * 1.01


def test_on_a_small_gpu_the_swap_buffer_holds_one_layer() -> None:
    memory = resolve_cluster(EngineConfig(policy="morph-performance"), LLAMA, load_hardware("l4")).memory
    (layer,) = {size for (_, precision), size in memory.layer_bytes.items() if precision == "int4"}
    assert memory.ledger.entries["exchange"] == layer


@pytest.mark.parametrize("hardware", ["h100", "l4"])
def test_copies_on_a_gpu_go_as_fast_as_its_link(hardware: str) -> None:
    device = load_hardware(hardware)
    assert resolve_cluster(EngineConfig(policy="morph"), LLAMA, device).copy_rate == device.links["pcie"].bandwidth
