"""Warm-up of the variants that layers may change to, so that a change of the plan compiles nothing."""

from collections.abc import Sequence

from jaxserve.control import BlockPlan, InstancePlan
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.config import ModelConfig
from jaxserve.executor.blocks import BlockSignature
from jaxserve.executor.executor import BlockExecutor


def warm_variants(
    executor: BlockExecutor,
    model: ModelConfig,
    instance: InstancePlan,
    variants: Sequence[str],
    foreseen: Sequence[InstancePlan] = (),
) -> None:
    """Compile the programs for a change of any layer to one of `variants`, and fuse the steps of `foreseen` plans.

    One layer of each kind (dense or sparse, and its sliding window) stands for all layers of that kind in a stage.
    At most one variant is loaded at a time.
    """
    signatures: dict[BlockPlan, BlockSignature] = {}
    for stage in instance.stages:
        layers = {block.block: layer_index(block.block) for block in stage.blocks if is_layer(block.block)}
        kinds = {name: (model.is_sparse(layer), model.window(layer)) for name, layer in layers.items()}
        running = [block for block in executor.blocks if block.block in kinds]
        warm = {(kinds[block.block], block.precision): block.signature() for block in running}
        for name, kind in kinds.items():
            for precision in variants:
                if (kind, precision) not in warm:
                    loaded = executor.prepare(name, precision)
                    executor.warm_layer(loaded)
                    warm[kind, precision] = loaded.signature()
                    loaded.free()
        for (kind, precision), signature in warm.items():
            signatures |= {BlockPlan(name, precision): signature for name in kinds if kinds[name] == kind}
    for plan in foreseen:
        blocks = [block for block in plan.blocks if is_layer(block.block)]
        # A user's policy may foresee plans whose variants are not available.
        if signatures.keys() >= set(blocks):
            executor.fuse_decodes([signatures[block] for block in blocks])
