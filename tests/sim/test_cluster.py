"""A cluster has the pages and bytes that a real engine resolves on hardware with as much memory."""

from dataclasses import replace

import pytest

from jaxserve.control import Resources, SizeTable
from jaxserve.control.resources import validate
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.dequantization import MAX_TILE_BYTES
from jaxserve.planning.memory import MemoryPlan
from jaxserve.sim.cluster import ShapeSizes, resolve_cluster
from jaxserve.sim.shape import ModelShape
from tests.sim.machines import CPU

BUNDLED = ModelShape.load(bundled_model_path())
LLAMA = ModelShape.load("llama-3-8b")


@pytest.mark.parametrize(
    "options",
    [
        {"memory_gb": 1.0},
        {"memory_gb": 2.0, "policy": "morph", "variants": ("int4",)},
        {"memory_gb": 0.644, "policy": "morph"},  # less than wanted, and layers can give some
        {"memory_gb": 0.644, "policy": "morph", "max_kv_pages": 400},
        {"memory_gb": 0.644, "policy": "morph", "kv_pages": 50},
        {"memory_gb": 1.4, "policy": "morph-performance", "variants": ("int8", "int3")},
        {"memory_gb": 1.3, "kv_pages": 100, "max_kv_pages": 300, "policy": "morph"},
        {"memory_gb": 1.3, "kv_pages": 100, "policy": "morph"},
        {"memory_gb": 0.54},  # less than all sequences could use
        {"memory_gb": 0.616, "variants": ("int4",)},  # variants for operators, without a policy
        {"memory_gb": 1.0, "precision": "int4"},
        {"memory_gb": 1.3, "layer_precision": "0-3:int8", "variants": ("int4",), "policy": "morph"},
        {"memory_gb": 0.54, "kv_cache_dtype": "int8"},
        {"memory_gb": 1.0, "max_model_len": 512, "max_num_seqs": 7, "max_num_batched_tokens": 107, "page_size": 8},
        {"memory_gb": 1.6, "pp": 3, "policy": "morph"},
        {"memory_gb": 1.0, "tp": 2},
        {"memory_gb": 1.4, "tp": 4, "policy": "morph", "variants": ("int4", "int3")},
    ],
)
def test_pages_and_bytes_are_those_of_the_real_engine(options) -> None:
    from jaxserve.planning import resolve as resolution  # loads JAX, which the simulator does not

    config = EngineConfig(**options)
    simulated = resolve_cluster(config, BUNDLED, CPU).memory
    runtime = simulated.ledger.entries["runtime"]
    devices = config.tp * config.pp
    host = devices * (simulated.ledger.budget - runtime) + runtime  # the process counts once, not on each device
    real = resolution.resolve(replace(config, memory_gb=(host + 0.5) / 1e9))
    if not real.granule:
        pytest.skip("the native kernels are not there: pools are not elastic")
    for field in ("plan", "variants", "reserved_kv_pages", "max_model_len", "buckets", "layer_bytes"):
        assert getattr(simulated, field) == getattr(real, field), field
    assert simulated.max_model_len == real.info.max_model_len
    less = runtime - real.ledger.entries["runtime"]
    assert simulated.ledger.entries == real.ledger.entries | {"runtime": runtime}
    assert simulated.ledger.budget == real.ledger.budget + less
    ours, theirs = (table_of(memory) for memory in (simulated, real))
    assert ours == replace(theirs, budget=theirs.budget + less, runtime=theirs.runtime + less)
    assert simulated.plan_fields(simulated.plan.instances[0], 1) == real.plan_fields(real.plan.instances[0], 1)
    assert ("variants" in real.ledger.entries) == bool(real.variants)  # pinned on the host if anyone may request them
    validate(real.plan, theirs)  # the plan at the start stays valid
    in_use = theirs.device_bytes(*real.plan.instances)
    assert in_use == {device: ledger.used for device, ledger in real.ledgers.items()}


def table_of(memory: MemoryPlan) -> Resources:
    """Return the limits of plans with their sizes as numbers, which can be compared."""
    resources = memory.resources(1e9)
    return replace(resources, sizes=SizeTable.of(resources.sizes, memory.plan.instances[0]))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
def test_what_xla_dequantises_at_once_is_that_of_the_real_engine(precision: str, tp: int) -> None:
    from jaxserve.planning.sizes import dequantized_bytes

    config = ModelConfig("LlamaForCausalLM", 128256, 4096, 32, 32, 8, 128, 14336, 8192)
    sizes = ShapeSizes(LLAMA, config, tp, 16, "auto", "gpu")
    found = sizes.dequantized("layers.0", precision)
    assert found == dequantized_bytes(config, "layers.0", tp, precision)
    if precision == "bfloat16":
        assert found == 0
    else:
        assert MAX_TILE_BYTES // 2 < found <= MAX_TILE_BYTES
