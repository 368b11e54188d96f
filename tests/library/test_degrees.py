"""Engines whose instances may merge: what they refuse, and that the padded model runs at every degree."""

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.build import build
from jaxserve.core.bundled import config_names, config_path
from jaxserve.core.degrees import Degrees
from jaxserve.kernels import native
from jaxserve.planning import resolve as resolution
from jaxserve.planning.kv_pages import of_degree
from jaxserve.planning.resolve import MAX_PADDING, Resolved, resolve
from jaxserve.planning.sizes import padding_cost
from jaxserve.sim.cluster import model_config
from jaxserve.sim.shape import ModelShape
from tests.conftest import TINY
from tests.support.internals import executor_of, stage_on_padding
from tests.support.reference import Reference
from tests.support.thorough import some

OPTIONS = {"load_format": "dummy", "warmup": False, "memory_gb": 8, "max_num_seqs": 4}
UNEVEN = TINY | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16, "intermediate_size": 90}
UNEVEN |= {"vocab_size": 499}
EVEN = TINY | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512}
PROMPTS = [np.random.default_rng(i).integers(3, 499, 20 + 11 * i).tolist() for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_policy_that_only_merges_holds_no_variants_and_reserves_nothing_for_them(tmp_path: Path) -> None:
    folder = write(tmp_path, TINY | {"num_key_value_heads": 4, "num_attention_heads": 4})

    def resolved(policy: str) -> Resolved:
        options = {"load_format": "dummy", "memory_gb": 8, "dp": 2, "max_tp": 2}
        return resolve(EngineConfig(model=folder, policy=policy, **options))

    static, merging = resolved("static"), resolved("tp_transform")
    assert merging.variants == static.variants == ()
    assert merging.buckets == static.buckets
    assert merging.plan == static.plan
    assert merging.limits.degrees == static.limits.degrees
    assert resolved("manual").variants[0] == resolved("tp_transform+morph").variants[0] == "int4"


def test_degrees_double_from_the_start_to_the_largest() -> None:
    degrees = Degrees(2, 8)
    assert (degrees.all(), degrees.larger()) == ((2, 4, 8), (4, 8))
    assert [degrees.members(degree) for degree in (2, 4, 8, 3, 16)] == [1, 2, 4, 1, 1]
    assert [degrees.padded_for(degree) for degree in (1, 2, 8, 3, 16)] == [8, 8, 8, 3, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 4, "max_tp": 3}, r"max_tp is 3: it must be tp \(1\) times a power of two"),
        ({"dp": 2, "tp": 2, "max_tp": 1}, r"max_tp is 1: it must be tp \(2\) times a power of two"),
        ({"dp": 2, "max_tp": 4}, "max_tp is 4: it must be at most tp x dp = 1 x 2 = 2"),
        ({"dp": 2, "pp": 2, "max_tp": 2}, r"max_tp is 2: with pp = 2 it must be tp \(1\)"),
        ({"dp": 8, "max_tp": 8}, "max_tp is 8: it must be at most 4, because the model has 4 kv heads"),
        ({"dp": 4, "max_tp": 0}, "max_tp is 0: it must be an integer of at least 1"),
    ],
)
def test_impossible_largest_degree_is_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model=write(tmp_path, EVEN), **OPTIONS, **options))


def test_degree_beyond_the_kv_heads_is_served_if_it_is_the_only_one(tiny_model: Path) -> None:
    for options in ({"tp": 4}, {"tp": 4, "max_tp": 4}):
        assert resolve(EngineConfig(model=tiny_model, **OPTIONS, **options)).padded_model.num_kv_heads == 4


@pytest.mark.parametrize("tp", some([1, 2, 4], 2))
def test_padded_model_says_the_same_at_every_degree(tmp_path: Path, tp: int) -> None:
    model = write(tmp_path, UNEVEN)
    with LLM(model, tp=tp, dp=4 // tp, max_tp=4, **OPTIONS) as llm:
        layer = executor_of(llm).blocks[1]
        assert layer.leaves
        outputs = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    reference = Reference(model)
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        rows = reference.logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert rows[range(8), tokens] == pytest.approx(rows.max(axis=-1), abs=1e-4)  # but for ties


@pytest.mark.parametrize("tp", some([2, 1], 1))
def test_quantised_shards_are_whole_on_every_device(tmp_path: Path, tp: int) -> None:
    model, options = write(tmp_path, UNEVEN), OPTIONS | {"layer_precision": "0:int8,1:int4,2:int3"}
    built = build(EngineConfig(model=model, tp=tp, dp=4 // tp, max_tp=4, **options))
    padded, entries = built.resolved.padded_model, built.resolved.ledger.entries
    blocks = built.instances[0].executor.blocks
    held = {id(leaf): leaf.addressable_shards[0].data.nbytes for block in blocks for leaf in block.leaves}
    assert entries["weights"] == sum(held.values()), "the ledger knows the bytes"
    built.close()
    with LLM(model, tp=tp, dp=4 // tp, max_tp=4, **options) as llm:
        outputs = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    reference = Reference(model, {0: "int8", 1: "int4", 2: "int3"}, padded_to=padded)
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        rows = reference.logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert rows[range(8), tokens] == pytest.approx(rows.max(axis=-1), abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"precision": "int4"}])
def test_shards_add_no_operation_on_one_device(tmp_path: Path, options: dict) -> None:
    """The programs of a model that is padded for four devices have the same operations as those of one device."""
    if not (native.targets() if options else native.multiplies_all()):
        pytest.skip("XLA joins gates and ups that lie in several parts")
    model, operations = write(tmp_path, EVEN | {"torch_dtype": "bfloat16"}), []
    for max_tp in (1, 4):
        built = build(EngineConfig(model=model, dp=4, max_tp=max_tp, **OPTIONS, **options))
        executor = built.instances[0].executor
        for shape in executor.buckets.all()[:: len(executor.buckets.all()) - 1]:
            step = stage_on_padding(executor, shape)
            layer = step.stage.layers[0]
            lowered = layer.executable.lower(step.x, *step.context, executor.pools[0], *layer.leaves)
            text = lowered.compile().as_text()
            found = Counter(re.findall(r"= \S+ ([a-z-]+)\(", text))
            operations.append(found - Counter({"parameter": found["parameter"], "bitcast": found["bitcast"]}))
        built.close()
    assert operations[:2] == operations[2:]
    assert operations[0]["custom-call"] > 0


@pytest.mark.parametrize("options", [{}, {"policy": "manual", "variants": ("int4",)}, {"precision": "int8"}])
def test_bytes_at_a_degree_are_those_of_an_engine_that_starts_with_it(tmp_path: Path, options: dict) -> None:
    base = {"model": write(tmp_path, UNEVEN), "max_tp": 4} | OPTIONS | options
    one = resolve(EngineConfig(**base, dp=4))
    for tp in (2, 4):
        other = resolve(EngineConfig(**base | {"max_num_seqs": tp * OPTIONS["max_num_seqs"]}, tp=tp, dp=4 // tp))
        stage = other.plan.instances[0].stages[0]
        assert of_degree(one.plan.instances[0], tp).stages[0].devices == stage.devices
        ours, theirs = (memory.limits.stage_entries(stage) for memory in (one, other))
        for name in ("weights", "workspace"):
            assert ours.get(name) == theirs.get(name), name
        # Held variants may be cut for as many degrees as instances have at once.
        assert ours.get("variants", 0) // one.pinned.cuts == theirs.get("variants", 0) // other.pinned.cuts
        assert one.limits.page_bytes(stage) == other.limits.page_bytes(stage)
        assert one.buckets_of(tp).max_num_seqs == other.buckets.max_num_seqs


# int3 is packed in units of 256 inputs. Widths that are no multiple of 256 times the degree grow by more.
INT3_BEYOND = {("llama-2-7b", 8), ("llama-2-13b", 8), ("qwen2.5-14b", 8), ("qwen2.5-32b", 8)}


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int3"])
@pytest.mark.parametrize("name", config_names("models"))
def test_padding_costs_at_most_three_percent(name: str, precision: str) -> None:
    model = model_config(ModelShape.load(config_path("models", name)))
    blocks = [("embed", "bfloat16"), *((block, precision) for block in model.block_ids[1:-1]), ("head", "bfloat16")]
    beyond = set()
    for degree in (2, 4, 8):
        padded = resolution.padded_config(model, degree, resolution.split_unit([precision]))
        weights, kv = padding_cost(model, padded, blocks)
        assert kv == 0
        if weights > MAX_PADDING:
            beyond.add((name, degree))
    assert beyond == ({case for case in INT3_BEYOND if case[0] == name} if precision == "int3" else set())


def test_costly_padding_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve(EngineConfig(model=write(tmp_path, EVEN), dp=4, max_tp=4, **OPTIONS))
        assert "with zeros" not in caplog.text
        resolve(EngineConfig(model=write(tmp_path, UNEVEN), dp=4, max_tp=4, **OPTIONS))
    assert re.search(r"4 parts enlarges its weights by \d+ % and its KV cache by 33 % with zeros", caplog.text)
