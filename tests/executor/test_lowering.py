"""Every executable of a step lowers for CUDA, on a machine without a GPU."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.build import build
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.sampling.ops import NUM_FIELDS, sparse_biases


@pytest.mark.parametrize(("decodes", "tiles", "kv"), [(4, 0, "auto"), (0, 2, "auto"), (8, 2, "auto"), (8, 2, "int8")])
def test_a_step_lowers_for_cuda(tiny_model: Path, decodes: int, tiles: int, kv: str) -> None:
    options = {"load_format": "dummy", "warmup": False, "max_num_seqs": 8, "dtype": "bfloat16"}
    built = build(EngineConfig(model=tiny_model, kv_cache_dtype=kv, **options))
    executor = built.instances[0].executor
    stage, shape = executor._stages[0], executor.buckets.shape(decodes, tiles, 1)
    tokens, rows, *context = executor._inputs[stage.placement](np.zeros(shape.size, np.int32), shape)
    newest = executor.sampler.newest
    x = stage.embed.executable(tokens, newest, *stage.embed.leaves)
    _, logits = stage.head.executable(x, rows, *stage.head.leaves)
    sampler = DeviceSampler(stage.placement, slots=8, vocab=logits.shape[1], max_len=16, top_logprobs=2, backend="xla")
    packed = np.zeros((NUM_FIELDS, shape.rows), np.int32)
    ids, biases = sparse_biases([], shape.rows)
    for function, arguments in (
        (stage.embed.executable, (tokens, newest, *stage.embed.leaves)),
        (stage.layers[0].executable, (x, *context, executor.pools[0], *stage.layers[0].leaves)),
        (stage.head.executable, (x, rows, *stage.head.leaves)),
        (sampler._greedy, (logits, packed, newest)),
        (sampler._random, (logits, packed, newest)),
        (sampler._adjusted, (logits, packed, newest, sampler._history, ids, biases)),
        (sampler._full, (logits, packed, newest, sampler._history, ids, biases)),
    ):
        program = function.function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert "jaxserve_" not in program, "a native CPU kernel in a program for CUDA"
    assert jax.default_backend() == "cpu"
    sampler.close()
    built.close()
