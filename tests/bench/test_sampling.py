"""bench.sampling: that it runs, and that rows have the requested parameters. Speed is not tested."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench import sampling
from jaxserve.kernels.native import sampling as native
from jaxserve.sampling import ops as sampler


def test_sampling_report_has_a_line_for_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    if not native.supported():
        pytest.skip("no native kernels")
    sampling.report([300], [2], repeats=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sampling.PARAMETERS)
    assert all("native" in line and line.endswith("x") for line in lines)


def test_packed_rows_have_the_parameters_of_the_case() -> None:
    rows = sampler.unpack_rows(
        jnp.asarray(sampling.packed_parameters({"temperature": 0.5, "top_k": 7, "top_p": 0.25}, 3, 300))
    )
    np.testing.assert_array_equal(rows.slot, [0, 1, 2])
    assert (np.asarray(rows.top_k) == 7).all()
    assert [float(rows.temperature[0]), float(rows.top_p[0]), float(rows.repetition[0])] == [0.5, 0.25, 1.0]
