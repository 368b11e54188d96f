"""Every executable of a step lowers for CUDA, on a machine without a GPU."""

from pathlib import Path

import pytest

from jaxserve import EngineConfig
from jaxserve.build import build
from jaxserve.sampling import ops
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.sampling.programs import SamplerPrograms
from tests.support.internals import sampling_calls, stage_on_padding


@pytest.mark.parametrize(("decodes", "tiles", "kv"), [(4, 0, "auto"), (0, 2, "auto"), (8, 2, "auto"), (8, 2, "int8")])
def test_step_programs_lower_for_cuda_without_native_kernels(
    tiny_model: Path, decodes: int, tiles: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "XLA_ON_CPU", ops.XLA)
    options = {"load_format": "dummy", "warmup": False, "max_num_seqs": 8, "dtype": "bfloat16"}
    built = build(EngineConfig(model=tiny_model, kv_cache_dtype=kv, **options))
    executor = built.instances[0].executor
    shape = executor.buckets.shape(decodes, tiles, 1)
    step = stage_on_padding(executor, shape)
    stage = step.stage
    _, logits = stage.head.executable(step.x, step.rows, *stage.head.leaves)
    sampler = DeviceSampler(
        SamplerPrograms(stage.placement, slots=8, vocab=logits.shape[1], max_len=16, top_logprobs=2, backend="xla")
    )
    sampling_programs = sampling_calls(sampler, logits)
    assert len(sampling_programs) == 7, "greedy, random, masked, adjusted, full; grammars; log-probabilities beside"
    for function, arguments in (
        (stage.embed.executable, (step.tokens, executor.sampler.newest, *stage.embed.leaves)),
        (stage.layers[0].executable, (step.x, *step.context, executor.pools[0], *stage.layers[0].leaves)),
        (stage.head.executable, (step.x, step.rows, *stage.head.leaves)),
        *sampling_programs,
    ):
        program = function.function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert "jaxserve_" not in program, "a native CPU kernel in a program for CUDA"
    sampler.close()
    built.close()
