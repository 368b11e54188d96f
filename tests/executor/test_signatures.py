"""The signature of a block, which is known before the block is loaded, equals that of the loaded block."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import pytest

from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.variants import Method, VariantWriter
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import ModelConfig
from jaxserve.executor.block_store import BlockStore
from jaxserve.executor.blocks import BlockBuilder
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.parallel.placement import Placement
from jaxserve.quantization.layer import round_layer
from tests.conftest import TINY
from tests.quantization.foreign import write

ONE, OTHER, TWO = (Placement(tuple(jax.devices()[part])) for part in (slice(1), slice(1, 2), slice(2, 4)))


def builder_of(checkpoint: Checkpoint, padded: ModelConfig) -> BlockBuilder:
    return BlockBuilder(padded, BlockStore(checkpoint, padded), partial(stored_layout, checkpoint, padded))


def check(builder: BlockBuilder, block: str, precision: str, placement: Placement) -> None:
    expected = builder.signature(block, precision, placement)
    loaded = builder.load(block, precision, placement)
    assert loaded.signature() == expected
    loaded.free()


@pytest.mark.parametrize("placement", [ONE, TWO], ids=["one device", "two devices"])
def test_signature_of_a_rounded_block_is_known(tiny_model: Path, placement: Placement) -> None:
    checkpoint = open_checkpoint(tiny_model, load_format="dummy")
    degree = len(placement.devices)
    padded = padded_config(checkpoint.config, degree, split_unit(("int8", "int4", "int3")) if degree > 1 else 1)
    builder = builder_of(checkpoint, padded)
    for block, precisions in {
        "embed": ("float32", "int8"),
        "layers.1": ("float32", "int8", "int4", "int3"),
        "head": ("float32", "int8"),
    }.items():
        for precision in precisions:
            check(builder, block, precision, placement)


@pytest.mark.parametrize(("group", "symmetric"), [(128, True), (64, False), (0, True)])
def test_signature_of_a_prepared_variant_is_known(tmp_path: Path, group: int, symmetric: bool) -> None:
    model = tmp_path / "model"
    shutil.copytree(bundled_model_path(), model, ignore=shutil.ignore_patterns("variants"))
    checkpoint = open_checkpoint(model)
    writer = VariantWriter(model / "variants", checkpoint, {"int4": Method("rtn", group, symmetric)})
    for index in range(checkpoint.config.num_layers):
        leaves = checkpoint.block(f"layers.{index}")
        writer.add(index, "int4", round_layer(leaves, 4, group=group, symmetric=symmetric))
    writer.finish()
    checkpoint = open_checkpoint(model)
    assert checkpoint.method("layers.0", "int4") == "rtn"
    check(builder_of(checkpoint, checkpoint.config), "layers.0", "int4", ONE)


def test_signature_of_a_layer_quantised_elsewhere_is_known_from_another_placement(tmp_path: Path) -> None:
    config = {**TINY, "hidden_size": 128, "intermediate_size": 256}
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {}
    model = open_checkpoint(plain, load_format="dummy").config
    for block in model.block_ids:
        shapes |= tensor_shapes(model, block)
    write(tmp_path / "awq", config, shapes, "awq")
    checkpoint = open_checkpoint(tmp_path / "awq")
    builder = builder_of(checkpoint, checkpoint.config)
    builder.load("layers.2", "int4", ONE)
    check(builder, "layers.2", "int4", OTHER)
