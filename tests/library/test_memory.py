"""The memory budget: the sizes that follow from it, and the configurations that it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, MemoryBudgetError
from jaxserve.build import build
from jaxserve.kernels import is_elastic
from jaxserve.planning import resolve as planning
from jaxserve.planning.memory import RUNTIME
from jaxserve.planning.resolve import resolve
from tests.conftest import TINY
from tests.support.internals import budget_on, stage_on_padding
from tests.support.sizes import page_bytes
from tests.support.thorough import some

OPTIONS = {"load_format": "dummy", "max_num_seqs": 8}


def test_kv_pages_follow_from_the_memory_budget(tiny_model: Path) -> None:
    roomy = resolve(EngineConfig(model=tiny_model, memory_gb=4, **OPTIONS))
    assert roomy.ledger.used <= roomy.ledger.budget
    assert roomy.plan.instances[0].stages[0].kv_pages == 8 * 256 // 16 + 1  # all that eight sequences can use
    fixed = roomy.ledger.used - roomy.ledger.entries["kv"]
    page = page_bytes(roomy)
    tight = resolve(EngineConfig(model=tiny_model, memory_gb=(fixed + 40.5 * page) / 1e9 + 0.05, **OPTIONS))
    assert tight.ledger.used <= tight.ledger.budget


def test_ledger_counts_the_bytes_of_weights_and_pools(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, memory_gb=4, warmup=False, **OPTIONS))
    executor, entries = built.instances[0].executor, built.resolved.ledger.entries
    leaves = {id(leaf): leaf for loaded in executor.blocks for leaf in loaded.leaves}.values()
    assert entries["weights"] == sum(leaf.nbytes for leaf in leaves)
    assert entries["kv"] == executor.pools.nbytes
    built.close()


@pytest.mark.parametrize(
    ("precision", "kv"), some([("auto", "auto"), ("int8", "auto"), ("int3", "auto"), ("auto", "int8")], 2)
)
def test_workspace_covers_the_compilers_temporaries(tmp_path: Path, precision: str, kv: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 2048}  # so that weights are larger than activations
    (tmp_path / "config.json").write_text(json.dumps(TINY | wide))
    options = OPTIONS | {"max_num_batched_tokens": 8 + 64}
    options |= {"precision": precision, "kv_cache_dtype": kv}
    built = build(EngineConfig(model=tmp_path, memory_gb=4, warmup=False, **options))
    executor = built.instances[0].executor
    shapes = executor.buckets.all()
    assert shapes
    for shape in shapes:
        step = stage_on_padding(executor, shape)
        first, last = step.stage.layers[0], step.stage.head
        layer = first.executable.lower(step.x, *step.context, executor.pools[0], *first.leaves).compile()
        head = last.executable.lower(step.x, step.rows, *last.leaves).compile()
        for compiled in (layer, head):
            stats = compiled.memory_analysis()
            fresh = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
            assert fresh <= built.resolved.ledger.entries["workspace"]
    built.close()


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_pools_are_updated_in_place(tiny_model: Path, kv: str) -> None:
    built = build(EngineConfig(model=tiny_model, memory_gb=4, warmup=False, kv_cache_dtype=kv, **OPTIONS))
    executor = built.instances[0].executor
    step = stage_on_padding(executor, executor.buckets.all()[0])
    first = step.stage.layers[0]
    (pool,), temporaries = executor.pools[0], []
    for pages in (pool.shape[0], 8 * pool.shape[0]):
        larger = jax.ShapeDtypeStruct((pages, *pool.shape[1:]), pool.dtype, sharding=pool.sharding)
        layer = first.executable.lower(step.x, *step.context, (larger,), *first.leaves).compile()
        stats = layer.memory_analysis()
        assert stats.alias_size_in_bytes >= pool.nbytes * pages // pool.shape[0]
        temporaries.append(stats.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]
    built.close()


def test_too_small_budget_error_says_how_much_is_needed(tiny_model: Path) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        LLM(tiny_model, memory_gb=0.1, **OPTIONS)
    needed = float(re.search(r"at least ([0-9.]+) GB", str(caught.value)).group(1))
    assert resolve(EngineConfig(model=tiny_model, memory_gb=needed + 0.05, **OPTIONS)).info.max_model_len >= 16
    with pytest.raises(MemoryBudgetError, match="kv needs"):
        resolve(EngineConfig(model=tiny_model, kv_pages=10**13, memory_gb=4, **OPTIONS))


def test_max_model_len_beyond_the_pool_is_lowered_unless_it_was_given(tiny_model: Path) -> None:
    resolved = resolve(EngineConfig(model=tiny_model, memory_gb=4, kv_pages=5, **OPTIONS))
    assert resolved.info.max_model_len == 80
    with pytest.raises(
        ConfigError, match="max_model_len is 200: it must be at most 80, the tokens in 5 KV pages of 16"
    ):
        resolve(EngineConfig(model=tiny_model, memory_gb=4, kv_pages=5, max_model_len=200, **OPTIONS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "max_model_len is 257"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens is 8"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"memory_gb": -1}, "memory_gb is -1"),
        ({"memory_gb": float("inf")}, "memory_gb is inf"),
        ({"slo_ttft": -1}, "slo_ttft is -1: it must be a number above 0"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5: it must be an integer of at least 1"),
        ({"memory_gb": "8"}, "memory_gb is '8'"),
        ({"max_kv_pages": 10**13}, "max_kv_pages is 10000000000000"),
        ({"dtype": "int8"}, "dtype is 'int8': it must be one of auto, bfloat16, float16, float32"),
        ({"load_format": "gguf"}, "load_format is 'gguf'"),
    ],
)
def test_options_outside_their_range_are_refused(tiny_model: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**({"model": tiny_model} | OPTIONS | options)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which 24 GB are the limit, 16 GB of them free."""
    monkeypatch.setattr(planning, "host_memory_limit", lambda: (24 * 10**9, "the memory of this machine"))
    monkeypatch.setattr(planning, "host_memory", lambda: 16 * 10**9)


@pytest.mark.parametrize("memory_gb", [4000, 24.001])
@pytest.mark.usefixtures("machine")
def test_memory_budget_above_the_machines_memory_is_refused(tiny_model: Path, memory_gb: float) -> None:
    limit = f"memory_gb is {memory_gb:g}: it must be at most 24.000, the memory of this machine in GB"
    with pytest.raises(ConfigError, match=re.escape(limit)):
        resolve(EngineConfig(model=tiny_model, memory_gb=memory_gb, **OPTIONS))
    with pytest.raises(ConfigError, match="memory_gb"):
        resolve(EngineConfig(model=tiny_model, memory_gb=memory_gb, dp=2, virtual_devices=2, **OPTIONS))


@pytest.mark.parametrize(("memory_gb", "lines"), [(20, 1), (24, 1), (16, 0), (None, 0)])
@pytest.mark.usefixtures("machine")
def test_memory_budget_above_what_is_free_is_warned_of_in_one_line(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, memory_gb: float | None, lines: int
) -> None:
    resolve(EngineConfig(model=tiny_model, memory_gb=memory_gb, **OPTIONS))
    said = [record.message for record in caplog.records if "memory_gb" in record.message]
    assert said == [f"memory_gb is {memory_gb}, of which only 16.000 GB are free now (--memory-gb)"] * lines


@pytest.mark.parametrize(("size", "allowed"), [(80 * 10**9, True), (8 * 10**9, False), (None, True)])
def test_memory_budget_above_a_devices_memory_is_refused(size: int | None, allowed: bool) -> None:
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: size and {"bytes_limit": size})
    config = EngineConfig(memory_gb=40)
    if allowed:
        assert budget_on(config, device) == 40 * 10**9
    else:
        with pytest.raises(ConfigError, match=r"memory_gb is 40: it must be at most 8\.000, .*MEM_FRACTION"):
            budget_on(config, device)


def test_ledger_counts_compiled_programs_on_the_host(tiny_model: Path) -> None:
    def runtime(**options: Any) -> int:
        resolved = resolve(EngineConfig(model=tiny_model, memory_gb=8, **(OPTIONS | options)))
        return resolved.ledger.entries["runtime"] * resolved.config.dp

    alone = runtime()
    assert alone > RUNTIME
    assert runtime(variants=("int8", "int4")) > alone  # programs of layers in these, too
    assert runtime(policy="morph") > runtime(variants=("int8", "int4"))  # and steps of the plans that it foresees
    assert runtime(dp=2) - RUNTIME == pytest.approx(2 * (alone - RUNTIME), abs=2)  # each instance has its own


@pytest.mark.parametrize("options", [{"variants": ("int8", "int4")}, {"precision": "int4"}, {"pp": 2}])
def test_bytes_of_blocks_split_otherwise_are_those_of_an_engine_that_splits_them(
    tiny_model: Path, options: dict
) -> None:
    """An engine knows the bytes of placements that it does not have, in the padding that they need."""
    base = {"model": tiny_model, "memory_gb": 8} | OPTIONS
    one = resolve(EngineConfig(**base, **options))
    for tp in (2, 4):
        other = resolve(EngineConfig(**base, **options, tp=tp))
        for stage in other.plan.instances[0].stages:
            ours, theirs = one.limits.stage_entries(stage), other.limits.stage_entries(stage)
            assert {name: ours[name] for name in ours if name != "kv"} == {
                name: theirs[name] for name in theirs if name != "kv"
            }
            assert one.limits.page_bytes(stage) == other.limits.page_bytes(stage)


def test_ledger_covers_the_resident_memory_of_a_first_start(tmp_path: Path) -> None:
    if not is_elastic("cpu"):
        pytest.skip("the constants are those of native kernels")
    script = """
import sys
from pathlib import Path
from jaxserve import EngineConfig
from jaxserve.build import build
import jaxserve.server.app  # a server's modules count, too
built = build(EngineConfig(memory_gb=4, kv_pages=20, max_num_seqs=8, compile_cache=sys.argv[1]))
fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(built.resolved.ledger.used, int(fields["VmHWM"].split()[0]) * 1024)
built.close()
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    planned, peak = map(int, done.stdout.split()[-2:])
    # Without requests the process needs somewhat less than the ledger has for them.
    assert 0.85 * planned <= peak <= 1.1 * planned
