"""`jaxserve sim plan --calibrate`: hardware fitted to a measured run of a server."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.result import save
from jaxserve.cli.main import app
from jaxserve.core.errors import ConfigError
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.calibration.base import base_hardware, nominal_cpu, with_precisions
from jaxserve.sim.calibration.factors import Factors, names_of
from jaxserve.sim.calibration.fit import errors_of, fit_factors
from jaxserve.sim.calibration.measured import MeasuredRun
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.hardware import Hardware, from_yaml, load_hardware, to_yaml
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.run import SimExperiment, cluster_of, run_simulation
from tests.sim.machines import GPU

TRUE = Factors(bandwidth=0.6, compute=0.75, step=1e-3, sequence=5e-5, request=1.2e-2)
MODEL = "llama-3-8b"


def result_of(path: Path, hardware: Hardware, rate: float, seed: int = 0, noise: float = 0.0) -> Path:
    """Write the result of `jaxserve bench serve` on a server on some hardware, whose latencies are a bit random."""
    (path.parent / "true.yaml").write_text(to_yaml(hardware))
    experiment = SimExperiment(
        ClusterOptions(model=MODEL, hardware=str(path.parent / "true.yaml")),
        DatasetOptions(num_prompts=80, input_len="uniform:50,1500", output_len="uniform:8,80", seed=seed),
        ArrivalOptions(request_rate=rate),
        TraceOptions(),
    )
    result = run_simulation(experiment, ["jaxserve", "bench", "serve"]) | {"simulated": False}
    result["environment"] = {"memory": "24 GiB", "date": "today"}
    rng = np.random.default_rng(seed)
    result["ttfts"] = [time * factor for time, factor in zip(result["ttfts"], _near_1(rng, noise), strict=False)]
    save(result, path)
    return path


def _near_1(rng: np.random.Generator, noise: float):
    return np.exp(rng.normal(0, noise, 1000)).tolist()


def cluster_on(hardware: Hardware, folder: Path):
    (folder / "tried.yaml").write_text(to_yaml(hardware))
    return cluster_of(ClusterOptions(model=MODEL, hardware=str(folder / "tried.yaml")), prefix_caching=False)


def decode_seconds(cluster: Cluster) -> float:
    return cluster.true_costs.of(cluster.memory.plan.instances[0]).seconds(StepLoad(8, 8, 8, 8 * 800, 0))


def test_known_factors_are_found_again_and_predict_another_rate(tmp_path) -> None:
    hardware = TRUE.applied(GPU)
    run = MeasuredRun.read(result_of(tmp_path / "run.json", hardware, rate=6.0, noise=0.05))
    found = fit_factors(run, GPU, lambda tried: cluster_on(tried, tmp_path), lambda: None)
    assert found.compute == pytest.approx(TRUE.compute, rel=0.1)
    assert found.request == pytest.approx(TRUE.request, rel=0.3)
    true, fitted = (decode_seconds(cluster_on(each, tmp_path)) for each in (hardware, found.applied(GPU)))
    assert fitted == pytest.approx(true, rel=0.1)  # of which bandwidth and overhead are hardly told apart
    other = MeasuredRun.read(result_of(tmp_path / "other.json", hardware, rate=10.0, seed=1))
    errors = errors_of(cluster_on(found.applied(GPU), tmp_path), other)
    assert max(each.median for each in errors.values()) < 0.05
    before = errors_of(cluster_on(GPU, tmp_path), other)
    assert min(each.median for each in before.values()) > 0.2


def test_a_prediction_that_is_right_has_no_error(tmp_path) -> None:
    hardware = TRUE.applied(GPU)
    run = MeasuredRun.read(result_of(tmp_path / "run.json", hardware, rate=6.0))
    for each in errors_of(cluster_on(hardware, tmp_path), run).values():
        assert (each.median, each.bias) == pytest.approx((0, 0), abs=1e-3)  # results have microseconds
    slow = replace(hardware, overheads=replace(hardware.overheads, request=1.0))
    assert errors_of(cluster_on(slow, tmp_path), run)["ttft"].bias > 1


def test_only_what_the_file_has_is_scaled() -> None:
    assert "host" not in names_of(GPU)
    assert "host" in names_of(load_hardware("h200"))
    h200 = load_hardware("h200")
    slower = replace(Factors.of(h200), host=2.0, bandwidth=0.5).applied(h200)
    assert slower.bandwidth == h200.bandwidth / 2
    assert slower.overheads.program == 2 * h200.overheads.program
    assert slower.overheads.layer == h200.overheads.layer
    assert slower.efficiency == h200.efficiency


def test_results_that_say_nothing_about_a_server_are_refused(tmp_path) -> None:
    good = json.loads(result_of(tmp_path / "good.json", GPU, rate=6.0).read_text())
    for change, message in (
        ({"simulated": True}, "is simulated"),
        ({"kind": "latency"}, "is of bench latency"),
        ({"ttfts": None}, "has no ttfts"),
        ({"errors": ["refused"] * 80}, "0 answered and 80 failed requests"),
    ):
        save(good | change, tmp_path / "bad.json")
        with pytest.raises(ConfigError, match=message):
            MeasuredRun.read(tmp_path / "bad.json")


def test_the_hardware_is_that_of_the_machine_of_the_run(tmp_path) -> None:
    run = MeasuredRun.read(result_of(tmp_path / "run.json", GPU, rate=6.0))
    assert base_hardware(None, run) == nominal_cpu(24 << 30)
    assert base_hardware(None, replace(run, gpus="2 x NVIDIA H200, 143771 MiB, driver 570")).name == "h200"
    assert base_hardware("l4", run).name == "l4"


def test_a_nominal_cpu_knows_the_precisions_of_the_run_alone() -> None:
    measured = with_precisions(nominal_cpu(), {"bfloat16", "int8"})
    assert set(measured.rates) == {"bfloat16", "int8"}
    assert set(measured.efficiency) == {"bfloat16", "int8", "attention"}
    assert from_yaml(to_yaml(measured)) == measured


def test_the_command_fits_checks_saves_and_plans_with_the_result(tmp_path) -> None:
    hardware = TRUE.applied(GPU)
    (tmp_path / "base.yaml").write_text(to_yaml(GPU))
    run, other = (
        result_of(tmp_path / f"{seed}.json", hardware, rate=rate, seed=seed) for seed, rate in ((1, 6.0), (2, 9.0))
    )
    fitted = tmp_path / "mine.yaml"
    words = ["sim", "plan", "--calibrate", str(run), "--check", str(other), "--hardware", str(tmp_path / "base.yaml")]
    words += ["--model", MODEL, "--save-hardware", str(fitted)]
    plan = ["--goodput", "ttft:2000", "--rate", "2", "--num-prompts", "30", "--policies", "static", "--jobs", "1"]
    done = CliRunner().invoke(app, [*words, *plan])
    assert done.exit_code == 0, done.output
    assert re.search(r"^2\.json +TTFT", done.output, re.MULTILINE)
    found = load_hardware(fitted)
    assert found.measured
    assert found.source.endswith(f"fitted by `jaxserve sim plan --calibrate` to 1.json (today), model {MODEL}")
    assert 0 <= found.errors["ttft"] < 0.1
    assert f"±{found.errors['ttft']:.0%}" in done.output
    assert f"--hardware {fitted}" in done.output
    refused = CliRunner().invoke(app, [*words[:-2], *plan])
    assert refused.exit_code == 1
    assert "--save-hardware" in refused.output


def test_options_of_the_measured_server_are_read_as_serve_reads_them(tmp_path) -> None:
    run = result_of(tmp_path / "run.json", GPU, rate=6.0)
    (tmp_path / "base.yaml").write_text(to_yaml(GPU))
    words = ["sim", "plan", "--calibrate", str(run), "--hardware", str(tmp_path / "base.yaml"), "--model", MODEL]
    adaptive = CliRunner().invoke(app, [*words, "--serve-args", "--policy morph"])
    assert adaptive.exit_code == 1
    assert "must have had the policy static" in adaptive.output
    unknown = CliRunner().invoke(app, [*words, "--serve-args", "--no-such-option 1"])
    assert unknown.exit_code
    assert "no such option: --no-such-option" in unknown.output
