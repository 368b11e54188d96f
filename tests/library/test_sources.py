"""Imported and prepared layers are served as they are stored."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import LLM, CheckpointError, EngineConfig, SamplingParams
from jaxserve.build import BuiltEngine, build
from jaxserve.calibration.pipeline import QuantizationSettings
from jaxserve.calibration.run import run
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.core.bundled import bundled_model_path
from jaxserve.models import config_from_hf
from jaxserve.models.dense import forward, restore_block
from jaxserve.planning.resolve import resolve
from jaxserve.quantization import QArray
from tests.conftest import TINY
from tests.quantization.foreign import write
from tests.support.internals import executor_of, run_on_padding

OPTIONS = {"warmup": False, "max_num_seqs": 4, "memory_gb": 4, "max_num_batched_tokens": 4 + 64}
CONFIG = config_from_hf(TINY)
SHAPES = {name: shape for block in CONFIG.block_ids for name, shape in tensor_shapes(CONFIG, block).items()}
PROMPT = list(range(3, 43))
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)


def check(llm: LLM, model: Path, precisions: Mapping[str, str]) -> None:
    """Check that the answer is that of the source's blocks, with activations that are not rounded."""
    loaded_blocks = executor_of(llm).blocks
    assert [loaded.precision for loaded in loaded_blocks[1:-1]] == list(precisions.values())
    checkpoint = open_checkpoint(model, dtype="float32")
    config = replace(checkpoint.config, kernel_backend="xla")
    blocks = {}
    for block, loaded in zip(config.block_ids, loaded_blocks, strict=True):
        precision = loaded.precision
        blocks[block] = restore_block(config, block, checkpoint.variant(block, precision), precision)
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    (answer,) = output.outputs
    tokens = np.array(PROMPT + list(answer.token_ids), np.int32)
    logits = forward(config, blocks, tokens)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float32)
    assert answer.logprobs is not None
    for i, token in enumerate(answer.token_ids):
        assert answer.logprobs[i][token].logprob == pytest.approx(expected[len(PROMPT) + i - 1][token], abs=0.002)


@pytest.mark.parametrize(("layout", "group", "symmetric"), [("awq", 32, False), ("pack_quantized", 0, True)])
def test_imported_checkpoint_runs_in_its_own_precision(
    tmp_path: Path, layout: str, group: int, symmetric: bool
) -> None:
    write(tmp_path, TINY, SHAPES, layout, group=group, symmetric=symmetric, skip="layers.0.")
    precisions = {"layers.0": "float32", "layers.1": "int4", "layers.2": "int4"}
    with LLM(tmp_path, **OPTIONS) as llm:
        loaded_blocks = executor_of(llm).blocks
        held = sum(leaf.nbytes for loaded in loaded_blocks for leaf in loaded.leaves)
        counted = resolve(EngineConfig(model=tmp_path, **OPTIONS)).ledger.entries["weights"]
        assert held <= counted <= 1.1 * held, "what its scales are in is known when they are read"
        check(llm, tmp_path, precisions)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with prepared variants, whose groups and zeros differ from those of rounding."""
    model = tmp_path_factory.mktemp("prepared") / "model"
    shutil.copytree(bundled_model_path(), model)
    run(model, QuantizationSettings(("int4",), "rtn", group=64, symmetric=False))
    return model


def test_prepared_variants_are_served_and_counted(prepared: Path) -> None:
    precisions = {f"layers.{n}": "int4" for n in range(8)} | {"layers.3": "int8"}
    # In float32 by XLA, which multiplies x as it is: rounding moves single logits by more than is allowed here.
    exact = {"kernel_backend": "xla", "dtype": "float32"}
    options = exact | {"precision": "int4", "layer_precision": "3:int8"}
    resolved = resolve(EngineConfig(model=prepared, **OPTIONS, **options))
    qkv = resolved.checkpoint.variant("layers.0", "int4")["attention.qkv"]
    assert isinstance(qkv, QArray)
    assert (qkv.group, qkv.zeros is None) == (64, False)
    assert resolved.checkpoint.variant("layers.0", "int8")["attention.qkv"].group == 128, "rounded: none is prepared"
    with LLM(prepared, **OPTIONS, **options) as llm:
        leaves = {id(leaf): leaf for loaded in executor_of(llm).blocks for leaf in loaded.leaves}
        assert resolved.ledger.entries["weights"] == sum(leaf.nbytes for leaf in leaves.values())
        check(llm, prepared, precisions)


def test_swap_to_a_prepared_variant_compiles_nothing(prepared: Path) -> None:
    built: BuiltEngine = build(EngineConfig(model=prepared, variants=("int4",), **(OPTIONS | {"warmup": True})))
    executor, before = built.instances[0].executor, dict(built.compilations.counts)
    loaded = executor.prepare("layers.5", "int4")
    assert len(loaded.leaves) == len(executor.blocks[6].leaves) + 4 * 2, "codes, scales and zeros"
    (old,) = executor.replace([loaded])
    old.free()
    for shape in executor.buckets.all():
        run_on_padding(executor, shape)
    assert built.compilations.counts == before
    built.close()


def test_variants_of_another_model_are_refused(prepared: Path, tmp_path: Path) -> None:
    write(tmp_path, TINY, SHAPES, "awq")
    shutil.copytree(prepared / "variants", tmp_path / "variants")
    with pytest.raises(CheckpointError, match="made from another model"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize("precision", ["int4", "int3"])
def test_prepared_layers_are_split_over_devices(prepared: Path, precision: str) -> None:
    """int3 needs padding here, so its layers are rounded anew."""
    built = build(EngineConfig(model=prepared, tp=2, precision=precision, **OPTIONS))
    loaded_blocks, padded = built.instances[0].executor.blocks, built.resolved.padded_model
    qkv = built.resolved.checkpoint.variant("layers.0", precision, padded)["attention.qkv"]
    assert qkv.group == (64 if precision == "int4" else 128)
    held = {id(leaf): leaf.addressable_shards[0].data.nbytes for loaded in loaded_blocks for leaf in loaded.leaves}
    assert built.resolved.ledger.entries["weights"] == sum(held.values())
    built.close()


def test_prepared_groups_that_tp_would_cut_become_smaller(prepared: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(prepared, model)
    run(model, QuantizationSettings(("int4",), "rtn", group=0))
    built = build(EngineConfig(model=model, tp=2, precision="int4", **OPTIONS))
    resolved, loaded_blocks = built.resolved, built.instances[0].executor.blocks
    whole, cut = (resolved.checkpoint.variant("layers.0", "int4", *at) for at in ((), (resolved.padded_model,)))
    assert cut["attention.o"].group < whole["attention.o"].group
    assert cut["attention.qkv"].group == whole["attention.qkv"].group, "its inputs are not split"
    held = {id(leaf): leaf.addressable_shards[0].data.nbytes for loaded in loaded_blocks for leaf in loaded.leaves}
    assert resolved.ledger.entries["weights"] == sum(held.values())
    built.close()
