"""Nothing is compiled while instances merge, split, end and begin, once their placements are warm."""

from pathlib import Path

import pytest

from jaxserve.executor import warm_placements
from jaxserve.executor.executor import BlockExecutor
from tests.library.test_merge import DENSE, KINDS, prompt_of, written
from tests.support.internals import RUN_BLOCKS
from tests.support.regrouped import Regrouped

OPTIONS = {
    "dp": 2,
    "max_tp": 2,
    "virtual_devices": 2,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 2 + 32,
    "kv_pages": 20,
    "variants": ("float32",),  # and no other: each has programs of its own
    "warmup": True,
    "fuse": None,
}


def test_regroups_compile_nothing_and_new_instances_find_fused_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_placements, "MAX_PAUSE_S", 0)
    engine = Regrouped(written(tmp_path, DENSE), **OPTIONS)
    by_blocks = []  # shapes of the steps that only decode and are not fused
    run_blocks = getattr(BlockExecutor, RUN_BLOCKS)

    def counted(self, index, stage, shape, *rest):
        if not shape.tiles:
            by_blocks.append(shape)
        return run_blocks(self, index, stage, shape, *rest)

    monkeypatch.setattr(BlockExecutor, RUN_BLOCKS, counted)
    changes = {
        "merge": lambda: engine.merge(*engine.names),
        "split": lambda: engine.split(engine.names[0]),
        "remove": lambda: engine.remove(engine.names[0]),
        "add": lambda: engine.add_instance(engine.plan.instances[0], *free(engine)),
    }
    try:
        engine.built.warm.wait()
        before = dict(engine.built.compilations.counts)
        for name, change in changes.items():
            kinds = list(KINDS.values())[: 2 if name == "remove" else None]  # so that the other one has room for KV
            for number, params in enumerate(kinds):
                engine.add(prompt_of(number, 5 + 15 * (number % 4)), params)
            for _ in range(5):
                engine.step()
            change()
            by_blocks.clear()
            engine.run()
            assert engine.built.compilations.counts == before, name
            assert not by_blocks, name
    finally:
        engine.close()


def free(engine: Regrouped) -> set[int]:
    return {0, 1} - {device for plan in engine.plan.instances for device in plan.devices}
