"""Pallas kernels that several programs share."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import once
from pallas_kernels.paged_attention import paged_attention
from tests.pallas.conftest import lowered
from tests.pallas.test_attention import REAL, arguments
from tests.support.internals import replace_lowered_kernels


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels lowered so far, none at the start of a test."""
    kernels = {}
    replace_lowered_kernels(monkeypatch, kernels)
    return kernels


def program(scale, q, pool, meta, times=1, **kwargs):
    for _ in range(times):
        q = paged_attention(q, pool, meta, scale=scale, **kwargs)
    return q


def calls(text):
    return text.count("@mosaic_gpu_v2")


def test_kernel_in_several_programs_is_lowered_once(kernels):
    shapes = arguments(*REAL["decode"])
    texts = [lowered(partial(program, 0.1), *shapes), lowered(partial(program, 0.1, times=2), *shapes)]
    assert len(kernels) == 1
    assert [calls(text) for text in texts] == [1, 1]  # twice in a program, it is a function that is called twice


@pytest.mark.parametrize(
    ("scale", "changed", "kwargs"),
    [(0.2, {}, {}), (0.1, {"B": 16}, {}), (0.1, {"segments": 2}, {}), (0.1, {}, {"window": 64})],
    ids=["scale", "rows", "segments", "window"],
)
def test_kernel_with_a_changed_parameter_is_lowered_separately(kernels, scale, changed, kwargs):
    shape = dict(zip("BNQKGDSW", REAL["decode"], strict=True))
    lowered(partial(program, 0.1), *arguments(**shape))
    lowered(partial(program, scale, **kwargs), *arguments(**shape | changed))
    assert len(kernels) == 2


def test_threads_needing_a_kernel_at_once_share_its_lowering(kernels):
    shapes = arguments(*REAL["decode"])
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(lowered, partial(program, 0.1, times=times), *shapes) for times in (1, 2, 3, 4)]
        assert [calls(future.result()) for future in futures] == [1] * 4
    assert len(kernels) == 1


def test_kernel_under_shard_map_is_lowered_once(kernels):
    """In a layer split over devices by `jax.shard_map`, each device launches the kernel on its own heads."""
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), (jax.sharding.AxisType.Auto,))
    heads, whole = jax.P(None, "tp"), jax.P()
    split = jax.shard_map(
        partial(program, 0.1), mesh=mesh, in_specs=(heads, heads, whole), out_specs=heads, check_vma=False
    )
    for times in (1, 2):
        assert calls(lowered(lambda *shapes, times=times: split(*shapes) * times, *arguments(*REAL["decode"]))) == 1
    assert len(kernels) == 1


def test_failed_lowering_raises_for_every_caller(kernels):
    def fails(x):
        raise ValueError("no such kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such kernel"):
            once.lowered_once(fails, "fails", [jnp.zeros(1)])
