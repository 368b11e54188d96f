"""The comparison of drivers for the loops of several instances."""

import sys

import pytest

from bench import host_loops


def test_every_driver_steps_all_instances(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--instances", "2", "--milliseconds", "1,2", "--seconds", "0.4"]
    monkeypatch.setattr(sys, "argv", ["host_loops", *options])
    host_loops.main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[2].strip() for row in rows] == ["threads", "ready", "in turn"]
    shares = [float(cell.strip().removesuffix("%")) for row in rows for cell in row.split("|")[3:5]]
    assert all(share > 0 for share in shares)
