"""The scripts of the simulator's figures run from a clean clone, and show what the manual says."""

import runpy
import sys
from pathlib import Path

import pytest

from jaxserve.bench.result import load
from jaxserve.sim.hardware import to_yaml
from tests.sim.machines import CPU
from tests.support.thorough import THOROUGH, some


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: object) -> None:
    """Run a script of bench/sim, as from the command line."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_module(f"bench.sim.{script}", run_name="__main__")


def rows(table: Path) -> list[list[str]]:
    """Return the cells of a table in Markdown, without its header."""
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_layers_in_int4_shorten_the_wait_for_the_first_token(monkeypatch, tmp_path):
    run(monkeypatch, "int4_layers", "--out", tmp_path)
    layers, *series = zip(*(map(float, row[:5]) for row in rows(tmp_path / "int4-layers.md")), strict=True)
    assert layers == (0, 8, 16, 32)
    for ttft, violations in (series[:2], series[2:]):
        assert ttft[0] > 1.2 * ttft[1] > 1.5 * ttft[2]
        assert violations[0] > violations[1] >= violations[2]
    assert (tmp_path / "int4-layers.png").stat().st_size > 5000


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: sixteen simulations")
def test_windows_under_four_policies(monkeypatch, tmp_path):
    run(monkeypatch, "windows", "--setting", "l4-marlin", "--out", tmp_path)
    found = {(row[0], row[1]): row for row in rows(tmp_path / "windows.md")}
    assert len(found) == 16
    assert not [row for row in found.values() if "worse" in row[2]]
    violated = {key: float(row[2]) for key, row in found.items()}
    for mode in ("morph", "morph-performance"):
        assert violated["azure-conv", mode] < violated["azure-conv", "full precision"] - 10, "where pages are short"
        assert int(found["azure-conv", mode][6]) > int(found["azure-conv", "full precision"][6])  # pages
    assert all(row[7] == "0" for (_, name), row in found.items() if "morph" not in name)  # decisions


def test_adaptation_on_more_instances(monkeypatch, tmp_path):
    run(monkeypatch, "scaling", "--policies", "static,morph", "--instances", "1,4", "--each", "60", "--out", tmp_path)
    found = {(row[0], int(row[1])): float(row[2]) for row in rows(tmp_path / "scaling-policies.md")}
    for count in (1, 4):
        assert found["morph", count] < found["static", count] - 20
    assert found["morph", 4] <= found["morph", 1] + 15, "60 requests of one instance say little"


def test_what_a_simulated_request_costs(monkeypatch, tmp_path):
    run(monkeypatch, "scaling", "--instances", "1,3", "--requests", "60", "--out", tmp_path)
    assert [row[:2] for row in rows(tmp_path / "scaling.md")] == [["1", "60"], ["3", "60"]]


def test_fidelity_has_the_real_engine_beside_the_simulated_one(monkeypatch, tmp_path):
    hardware = tmp_path / "cpu.yaml"
    hardware.write_text(to_yaml(CPU))
    short = ("--loads", "near", "--seconds", 1, "--rounds", 1, "--hardware", hardware)
    run(monkeypatch, "fidelity", "--models", "bundled", *short, "--out", tmp_path)
    found = rows(tmp_path / "fidelity.md")
    assert [row[1] for row in found] == ["near"] * 5
    *times, violations = found
    assert all(float(cell.split()[0]) > 0 for row in times for cell in (row[3], row[4], row[6]))
    assert violations[2] == "SLO violated, share"
    real, simulated = (load(tmp_path / f"bundled-near-{name}.json") for name in ("0", "0-simulated-own"))
    assert real["completed"] == simulated["completed"] >= 20
    assert real["total_output_tokens"] == simulated["total_output_tokens"]
    assert simulated["simulated"]
    assert "simulated" not in real


def test_what_merges_and_splits_cost(monkeypatch, tmp_path):
    run(monkeypatch, "tp_costs", "--out", tmp_path)
    found = {tuple(row[:3]): row for row in rows(tmp_path / "tp-costs.md")}
    assert len(found) == 32
    for (_, change, usage), row in found.items():
        assert (float(row[3]) == 0) == (change.startswith("merge") and usage == "0%"), "weights stay where they are"
    assert float(found["llama-3-8b", "merge 4", "90%"][7]) > float(found["llama-3-8b", "merge 4", "10%"][7])


@pytest.mark.parametrize(("script", "lines"), some([("tp_degrees", 9), ("tp_scheduler", 6), ("tp_mixes", 14)], 1))
def test_experiments_of_merging_instances_run(monkeypatch, tmp_path, script, lines):
    run(monkeypatch, script, "--quick", "--out", tmp_path)
    (table,) = tmp_path.glob("*.md")
    found = [row for row in rows(table) if row[0] not in ("instances", "scheduler", "system") and "---" not in row[0]]
    assert len(found) == lines


def test_the_experiment_of_dropping_layers_runs(monkeypatch, tmp_path):
    run(monkeypatch, "drops", "--quick", "--lengths", "longbench", "--out", tmp_path)
    found = [row for row in rows(tmp_path / "drops.md") if row[0] != "system" and "---" not in row[0]]
    assert len(found) == 8 + 4 + 8  # times, groups, multiples of the best P50
    p99 = {row[0]: float(row[2]) for row in found[:8]}
    assert p99["memory that never runs out"] < p99["recomputation"]
    assert p99["drop, all KV at once, equal tokens"] < p99["recomputation"]
