"""Static parallelism: any tp, pp and dp on eight devices gives the results of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.build import build
from jaxserve.models.quantized import group_of
from jaxserve.planning.resolve import resolve
from tests.conftest import TINY
from tests.golden.cases import CASES
from tests.support.internals import executor_of, instances_of
from tests.support.reference import Reference
from tests.support.thorough import some

# All prompts fit into one step, so that few step shapes are compiled for each set of devices.
OPTIONS = {"load_format": "dummy", "warmup": False, "memory_gb": 8, "max_num_seqs": 8}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
PROMPTS = [np.random.default_rng(i).integers(3, 499, 20 + 11 * i).tolist() for i in range(6)]


def check(llm: LLM, reference: Reference) -> None:
    for p, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False), strict=True):
        (answer,) = output.outputs
        expected = reference.logprobs(p + list(answer.token_ids))
        assert answer.logprobs is not None
        for i, token in enumerate(answer.token_ids):
            row = expected[len(p) + i - 1]
            assert row[token] == pytest.approx(row.max(), abs=1e-4)  # the most likely, but for ties
            assert answer.logprobs[i][token].logprob == pytest.approx(row[token], abs=1e-3)


@pytest.mark.parametrize(("tp", "pp", "dp"), [*some([(2, 1, 1), (4, 1, 1), (1, 3, 1), (2, 2, 2)], 3), (1, 1, 4)])
def test_parallel_results_equal_those_of_one_device(
    tiny_model: Path, reference: Reference, tp: int, pp: int, dp: int
) -> None:
    with LLM(tiny_model, tp=tp, pp=pp, dp=dp, **OPTIONS) as llm:
        loaded_blocks = [loaded for steps in instances_of(llm) for loaded in steps.executor.blocks]
        assert len({device for loaded in loaded_blocks for device in loaded.placement.devices}) == tp * pp * dp
        check(llm, reference)


def test_heads_and_sizes_that_tp_does_not_divide_are_padded(tmp_path: Path) -> None:
    shape = {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "intermediate_size": 90,
        "vocab_size": 499,
    }
    (tmp_path / "config.json").write_text(json.dumps(TINY | shape))
    with LLM(tmp_path, tp=4, **OPTIONS) as llm:
        check(llm, Reference(tmp_path))


@pytest.mark.parametrize(("tp", "pp"), some([(2, 2), (4, 1), (2, 1)], 1))
def test_quantised_layers_are_split_over_devices(tiny_model: Path, tp: int, pp: int) -> None:
    options = OPTIONS | {"layer_precision": "0:int8,1:int4,2:int3", "tp": tp, "pp": pp}
    built = build(EngineConfig(model=tiny_model, **options))
    padded, entries = built.resolved.padded_model, built.resolved.ledger.entries
    layers = [loaded for loaded in built.instances[0].executor.blocks if loaded.block.startswith("layers.")]
    assert len(layers) == 3
    for loaded in layers:
        whole = sum(leaf.nbytes for leaf in loaded.leaves)
        share = sum(leaf.addressable_shards[0].data.nbytes for leaf in loaded.leaves)
        assert share < whole / tp + 1024, "all but the norms"
    if pp == 1:
        loaded_blocks = built.instances[0].executor.blocks
        held = {id(leaf): leaf.addressable_shards[0].data.nbytes for loaded in loaded_blocks for leaf in loaded.leaves}
        assert entries["weights"] == sum(held.values())
    built.close()
    with LLM(tiny_model, **options) as llm:
        check(llm, Reference(tiny_model, {0: "int8", 1: "int4", 2: "int3"}, padded_to=padded))


def test_quantised_experts_are_split_over_devices(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["qwen3_moe"] | {"vocab_size": 500, "dtype": "float32"}))
    options = OPTIONS | {"precision": "int4", "tp": 2}
    padded = resolve(EngineConfig(model=tmp_path, **options)).padded_model
    with LLM(tmp_path, **options) as llm:
        check(llm, Reference(tmp_path, dict.fromkeys(range(3), "int4"), "int8", padded_to=padded))


def test_share_that_is_not_a_whole_number_of_packing_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="a share of 96 inputs is not a multiple of 128"):
        group_of(192, 4, 2)
    assert [group_of(size, bits, parts) for size, bits, parts in ((512, 4, 2), (192, 8, 2), (96, 4, 1))] == [
        128,
        32,
        32,
    ]


def test_tensor_parallel_device_holds_only_its_share(tiny_model: Path) -> None:
    with LLM(tiny_model, tp=2, **OPTIONS) as llm:
        executor = executor_of(llm)
        assert len(executor.pools[:]) == 3, "one for each layer"
        for (pool,) in executor.pools:
            assert {shard.data.shape[1] for shard in pool.addressable_shards} == {1}  # one of two kv heads
        layer = executor.blocks[1]
        whole = sum(leaf.nbytes for leaf in layer.leaves)
        share = sum(leaf.addressable_shards[0].data.nbytes for leaf in layer.leaves)
        assert share < 0.51 * whole + 1024


def test_devices_of_a_process_that_has_started_jax_are_counted_as_its_own(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 16 devices: this process has 8 already .* new process or notebook"):
        LLM(tiny_model, **OPTIONS, tp=16)


@pytest.mark.parametrize("options", [{"tp": 16}, {"pp": 4}, {"tp": 0}, {"dp": 9}])
def test_impossible_parallel_degrees_are_refused(tiny_model: Path, options: dict) -> None:
    assert len(jax.devices()) == 8
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM(tiny_model, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_devices": 0}, "virtual_devices is 0: it must be an integer of at least 1"),
        ({"virtual_devices": 3, "tp": 2, "dp": 2}, "virtual_devices is 3: tp x pp x dp needs 4 devices"),
        ({"virtual_devices": 9}, "virtual_devices is 9: this process has 8 already"),
    ],
)
def test_impossible_number_of_virtual_devices_is_refused(tiny_model: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model, **OPTIONS, **options)


def test_devices_beyond_the_virtual_ones_are_not_used(tiny_model: Path) -> None:
    resolved = resolve(EngineConfig(model=tiny_model, virtual_devices=4, **OPTIONS))
    assert resolved.devices == tuple(jax.devices()[:4])
    assert resolved.limits.budget == OPTIONS["memory_gb"] * 1e9 // 4, "they share the host's memory"


VIRTUAL = """
import os
import jax
from jaxserve.core.config import EngineConfig
from jaxserve.planning.resolve import resolve

resolved = resolve(EngineConfig(virtual_devices=3, dp=2, memory_gb=8))
print(len(resolved.devices), len(jax.devices()), os.environ["PJRT_NPROC"])
"""


def test_virtual_devices_are_made_without_xla_flags() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run([sys.executable, "-c", VIRTUAL], env=environment, capture_output=True, text=True, check=True)
    devices, of, threads = map(int, done.stdout.split())
    assert (devices, of) == (3, 3)
    assert threads >= 4 * 3


SCORES = """
from jaxserve import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
with LLM(tp=2, memory_gb=8, max_num_seqs=8, warmup=False) as llm:
    for first in range(20):
        (answer,) = llm.generate([[5 + first] * 300], params, use_tqdm=False)
        assert len(answer.prompt_logprobs) == 300
print("scored")
"""


def test_prompt_scoring_on_one_thread_per_device_does_not_deadlock() -> None:
    """The test needs its own process, which XLA ends if programs wait for each other.

    More devices than the engine uses, as in the other tests, would give spare threads.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PJRT_NPROC": "2"}
    command = [sys.executable, "-c", SCORES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "scored\n", done.stderr[-2000:]
