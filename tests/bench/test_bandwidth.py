"""bench.bandwidth: what is read, and the arithmetic. Speed is not tested."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from bench.bandwidth import Bandwidth, compiled, measure
from bench.kernels_cpu import matmul_line
from jaxserve.kernels.native.build import compiler

needs_compiler = pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="no C++ compiler")
WORDS = 4 * 32  # that are read together: four streams of four cache lines


@needs_compiler
def test_bandwidth_loop_reads_every_word():
    read = compiled()
    words = np.zeros(3 * WORDS, np.uint64)
    for position in range(len(words)):
        words[position] = 1 << (position % 64)
        assert read(words) == words[position], position
        words[position] = 0


@needs_compiler
def test_bandwidth_loop_skips_incomplete_blocks():
    words = np.ones(WORDS + 5, np.uint64)
    words[WORDS:] = 2
    assert compiled()(words) == 0, "the exclusive or of an even number of ones"


@needs_compiler
def test_bandwidth_median_is_at_most_the_best_pass():
    found = measure(threads=2, size=1 << 20, passes=3)
    assert 0 < found.median <= found.best


def test_bandwidth_without_compiler_raises(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(OSError, match="/nowhere"):
        measure(threads=1, size=1 << 20, passes=1)


def test_bandwidth_share_is_relative_to_the_median():
    assert Bandwidth(median=20.0, best=25.0).share(200e6, 0.02) == pytest.approx(0.5)


def test_product_of_few_rows_shows_its_share_of_the_bandwidth():
    w = jnp.ones((1000, 500), jnp.bfloat16)  # 1 MB
    memory = Bandwidth(median=4.0, best=5.0)
    line = matmul_line([1e-3, 5e-4, 8e-4], 4, w, memory)
    assert line.split() == ["0.500", "0.800", "ms", "1.2", "GB/s", "5", "GFLOP/s", "31%", "of", "the", "bandwidth"]
    assert "bandwidth" in matmul_line([1e-3], 32, w, memory)
    assert "bandwidth" not in matmul_line([1e-3], 512, w, memory), "there arithmetic is the limit"
    assert "bandwidth" not in matmul_line([1e-3], 1, w, None)
