"""GPTQ: each step changes the outputs least, and the whole changes them less than rounding."""

import numpy as np
import pytest

from jaxserve.calibration.gptq import compensated
from jaxserve.quantization.packing import unpack
from jaxserve.quantization.rounding import quantize


def correlated_rows(size: int) -> np.ndarray:
    """Return inputs that depend on each other, as hidden states do."""
    rng = np.random.default_rng(4)
    return (
        rng.normal(size=(400, size // 4)) @ rng.normal(size=(size // 4, size)) + rng.normal(size=(400, size))
    ).astype(np.float32)


def reference(w: np.ndarray, gram: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int) -> np.ndarray:
    """Return signed codes by the definition: after each input the others solve least squares anew (OBQ).

    Inputs are taken in the order of their mean squares.
    """
    w, chosen = w.astype(np.float64).copy(), np.empty(w.shape)
    h = gram.astype(np.float64) + 0.01 * gram.diagonal().mean() * np.eye(len(gram))
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    later = list(np.argsort(-gram.diagonal(), kind="stable"))
    while later:
        i = later.pop(0)
        chosen[:, i] = np.clip(np.rint(w[:, i] / scales[:, i] + zeros[:, i]), low, high)
        error = w[:, i] - (chosen[:, i] - zeros[:, i]) * scales[:, i]
        w[:, later] += error[:, None] * np.linalg.solve(h[np.ix_(later, later)], h[later, i])
    return chosen


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_gptq_remaining_inputs_compensate_for_each_rounded_one(bits, symmetric):
    x = correlated_rows(64)
    gram = x.T @ x / len(x)
    w = np.random.default_rng(6).normal(size=(10, 64)).astype(np.float32)
    q = compensated(w, gram, bits, group=32, symmetric=symmetric)
    scales = np.repeat(q.scales.astype(np.float64), 32, axis=1)
    zeros = np.zeros_like(scales) if q.zeros is None else np.repeat(q.zeros.astype(np.float64), 32, axis=1)
    found = unpack(q.codes, bits, 64).astype(int) - (1 << (bits - 1))
    same = found == reference(w, gram, scales, zeros, bits)
    assert same.mean() > (0.9 if bits == 8 else 0.97)  # what falls between two codes may go to either, and moves others


@pytest.mark.parametrize("shape", [(6, 128), (2, 3, 5, 96)])
@pytest.mark.parametrize("bits", [4, 3])
def test_gptq_outputs_change_less_than_rounded_ones(bits, shape):
    x = correlated_rows(shape[-1])
    w = np.random.default_rng(8).normal(size=shape).astype(np.float32)

    def change(q) -> float:
        return float(np.square(x @ (np.asarray(q.dequantize()) - w).reshape(-1, shape[-1]).T).mean())

    solved = compensated(w, x.T @ x / len(x), bits, group=32, symmetric=True)
    assert solved.shape == shape
    assert change(solved) < 0.8 * change(quantize(w, bits, group=32))


def test_gptq_of_inputs_never_seen_equals_rounding():
    gram = np.zeros((64, 64), np.float32)
    w = np.random.default_rng(9).normal(size=(3, 64)).astype(np.float32)
    found = compensated(w, gram, 4, group=32, symmetric=True)
    np.testing.assert_array_equal(found.dequantize(), quantize(w, 4, group=32).dequantize())
