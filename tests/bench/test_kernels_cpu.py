"""bench.kernels_cpu: that it runs, and what it measures. Speed is not tested."""

import pytest

from bench import kernels_cpu
from bench.kernels_cpu import Format, random_weight, report_matmul
from jaxserve.kernels import native


@pytest.fixture
def tiny(monkeypatch):
    """Use a single weight per product, and skip the memory bandwidth."""
    monkeypatch.setattr(kernels_cpu, "WORKING_SET", 0)
    monkeypatch.setattr(kernels_cpu, "read_memory", lambda: None)


@pytest.mark.parametrize(("group", "zero_points"), [(128, False), (32, True), (0, True)])
def test_matmul_report_has_a_line_for_every_product(tiny, capsys, group, zero_points):
    report_matmul(1, group, zero_points, shapes=[(64, 256)], row_counts=[1, 32])
    first, *lines = capsys.readouterr().out.splitlines()
    assert ("with zeros" in first) == zero_points
    named = [(line.split("rows=")[1][:2].strip(), line.split("rows=")[1][4:17].strip()) for line in lines]
    ours = ["16 bits", "8 bits", "4 bits", "3 bits"] if native.targets() else []
    one, many = [*ours, "xla, 16 bits"], [*ours, "xla, 16 bits", "xla, int8"]
    assert named == [*(("1", name) for name in one), *(("32", name) for name in many)]


def test_random_weight_has_the_requested_format():
    w = random_weight(8, 256, Format(4, 32, zero_points=True))
    assert (w.bits, w.group, w.zeros.shape) == (4, 32, (8, 8))
    assert random_weight(8, 256, Format(8, 0)).group == 256
    assert random_weight(8, 256, Format(3)).zeros is None
