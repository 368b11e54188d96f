"""The result of a simulated run, in the form of `jaxserve bench`."""

import json
from pathlib import Path

import pytest

from jaxserve.bench.compare import side_by_side
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.report import write_report
from jaxserve.bench.result import load, save
from jaxserve.bench.table import remarks
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.core.step_load import StepLoad
from jaxserve.sim import run as running
from jaxserve.sim.cost_model import RooflineModel
from jaxserve.sim.hardware import to_yaml
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.run import SimExperiment, run_simulation
from jaxserve.sim.shape import ModelShape
from tests.sim.machines import CPU, GPU

TIMED = ("date", "command", "environment")
SMALL = {"num_prompts": 60, "input_len": "uniform:50,400", "output_len": "uniform:5,60"}


@pytest.fixture
def machines(tmp_path: Path) -> dict[str, str]:
    """Return the hardware files of these tests by name."""
    for name, hardware in (("gpu", GPU), ("cpu", CPU)):
        (tmp_path / f"{name}.yaml").write_text(to_yaml(hardware))
    return {name: str(tmp_path / f"{name}.yaml") for name in ("gpu", "cpu")}


def simulated(hardware: str, *, rate: float = 20.0, dataset=None, trace=None, figures=None, label=None, **cluster):
    """Return the result of a run, by default with a few random requests."""
    dataset = SMALL if dataset is None and trace is None else dataset or {}
    experiment = SimExperiment(
        ClusterOptions(hardware=hardware, **cluster),
        DatasetOptions(**dataset),
        ArrivalOptions() if trace else ArrivalOptions(request_rate=rate),
        TraceOptions(**trace or {}),
        FigureOptions(**figures or {}),
        label,
    )
    return run_simulation(experiment, ["jaxserve", "sim"])


def written(tmp_path: Path, *rows: str) -> dict[str, Path]:
    (tmp_path / "trace.csv").write_text("\n".join(("arrival_s,input_tokens,output_tokens", *rows)) + "\n")
    return {"trace": tmp_path / "trace.csv"}


# -- figures


def test_a_request_alone_takes_what_the_formula_says(machines, tmp_path) -> None:
    result = simulated(machines["gpu"], model="llama-3-8b", trace=written(tmp_path, "1,640,3"))
    shape = ModelShape.load("llama-3-8b")
    chain = running.cluster_of(ClusterOptions(model="llama-3-8b", hardware=machines["gpu"]), prefix_caching=False)
    plan = chain.memory.plan.instances[0]
    steps, buckets = RooflineModel(shape, GPU).of(plan), chain.memory.buckets
    prompt = buckets.shape(0, 10, 0)
    first = steps.seconds(StepLoad(prompt.tokens, prompt.rows, 0, 0, 640 * 641))
    later = [steps.seconds(StepLoad(1, 1, 1, context, 0)) for context in (641, 642)]
    assert result["ttfts"] == [pytest.approx(GPU.overheads.request + GPU.overheads.host + first, abs=1e-6)]
    assert result["itls"] == [[pytest.approx(seconds, abs=1e-6) for seconds in later]]
    assert result["duration"] == pytest.approx(result["ttfts"][0] + sum(later), abs=1e-6)
    assert result["arrival_times"] == result["start_times"] == [1.0]


def test_figures_of_a_small_run_stay_what_they_were(machines) -> None:
    result = simulated(machines["gpu"], model="llama-3-8b", cluster="2", figures={"goodput": ["ttft:60 tpot:30"]})
    golden = {
        "kv_pages": 28234,
        "duration": 3.390344297,
        "max_output_tokens_per_s": 682,
        "max_concurrent_requests": 13,
        "slo_attainment": 0.916666667,
        "mean_ttft_ms": 45.043374782,
        "p99_ttft_ms": 72.3727897,
        "mean_tpot_ms": 10.336701179,
        "max_itl_ms": 61.430094336,
        "mean_e2el_ms": 379.589188513,
        "p90_queue_ms": 13.333333333,
    }
    assert {key: result[key] for key in golden} == pytest.approx(golden)


def test_the_same_seed_gives_the_same_result(machines) -> None:
    options = {"policy": "morph-performance", "slo_ttft": 0.1, "memory_gb": 0.99, "kv_pages": 60, "max_kv_pages": 300}
    options |= {"max_model_len": 512}
    many = SMALL | {"num_prompts": 120}
    first, second = (simulated(machines["cpu"], rate=50.0, dataset=many, **options) for _ in range(2))
    assert json.dumps({**first, **dict.fromkeys(TIMED)}) == json.dumps({**second, **dict.fromkeys(TIMED)})
    other = simulated(machines["cpu"], rate=50.0, dataset=many | {"seed": 1}, **options)
    assert other["ttfts"] != first["ttfts"]
    assert first["decisions"]
    assert first["restored_after_s"] > 0


def test_more_instances_serve_the_same_load_sooner(machines) -> None:
    waits = [simulated(machines["gpu"], model="llama-3-8b", rate=60.0, cluster=text) for text in ("1", "2x2")]
    assert [result["dp"] for result in waits] == [1, 4]
    assert waits[1]["mean_ttft_ms"] < waits[0]["mean_ttft_ms"]
    assert waits[1]["max_concurrent_requests"] < waits[0]["max_concurrent_requests"]


def test_a_policy_without_anything_to_do_says_why(machines) -> None:
    idle = simulated(machines["gpu"], model="llama-3-8b", policy="morph")
    assert not idle["decisions"]
    assert idle["idle_policy"].startswith("the policy morph changed nothing: KV use was at most ")
    assert "(it acts above 85% or 0.1 s)" in idle["idle_policy"]
    assert idle["idle_policy"] in remarks(idle)
    dropping = simulated(machines["gpu"], model="llama-3-8b", policy="param_drop", cluster="2")
    assert "(it acts above 90% or 0.1 s)" in dropping["idle_policy"]
    assert "idle_policy" not in simulated(machines["gpu"], model="llama-3-8b")


def test_a_model_that_is_too_large_names_the_degree_that_it_fits_with() -> None:
    with pytest.raises(MemoryBudgetError, match=r"at least 144.426 GB.*: --tp 2 divides it over 2 devices"):
        running.cluster_of(ClusterOptions(model="llama-3-70b", hardware="h100"), prefix_caching=False)


def test_looking_at_the_instances_changes_no_figure(machines) -> None:
    without, often = (simulated(machines["gpu"], figures={"metrics_interval": s}) for s in (0.0, 0.05))
    assert not without.pop("server")
    assert often.pop("server")["t"][1] == 0.05
    assert {**without, **dict.fromkeys(TIMED)} == {**often, **dict.fromkeys(TIMED)}


# -- requests that fail


def test_a_full_queue_and_too_long_a_prompt_are_failures_with_their_reasons(machines, tmp_path) -> None:
    trace = written(tmp_path, *["0,100,10"] * 8, "1,3000,10", "1,100,3000")
    result = simulated(machines["cpu"], trace=trace, max_num_seqs=2, max_queued_requests=3)
    assert result["completed"] + result["failed"] == 10
    errors = [error for error in result["errors"] if error]
    assert len(errors) == result["failed"] == 5 + 2
    assert errors[0] == "3 sequences are waiting, the limit is 3 (max_queued_requests)"
    assert errors[-2].startswith("This model's maximum context length is 2048 tokens")
    assert errors[-1].startswith("max_tokens is 3000, the limit is 1948")
    few = simulated(machines["cpu"], trace=trace, max_num_seqs=2, max_queued_requests=3, figures={"detail": False})
    assert few["failures"] == {error: errors.count(error) for error in errors}
    assert few["failed"] == result["failed"]
    assert "errors" not in few


# -- without detail


def test_without_detail_the_figures_are_the_same_and_lists_are_left_out(machines, monkeypatch) -> None:
    whole = simulated(machines["gpu"], model="llama-3-8b", rate=40.0)
    monkeypatch.setattr(running, "MAX_DETAILED", 10)
    few = simulated(machines["gpu"], model="llama-3-8b", rate=40.0)
    lists = {key for key, value in whole.items() if isinstance(value, list) and key != "variants"}
    assert lists == {
        "input_lens",
        "output_lens",
        "arrival_times",
        "start_times",
        "ttfts",
        "itls",
        "latencies",
        "errors",
    }
    assert whole.keys() - lists == few.keys() - {"failures"}
    for key in whole.keys() - lists - set(TIMED):
        if "itl" not in key and key != "max_output_tokens_per_s":
            assert few[key] == pytest.approx(whole[key]) if isinstance(whole[key], float) else few[key] == whole[key], (
                key
            )
    assert few["mean_itl_ms"] == pytest.approx(whole["mean_itl_ms"])


@pytest.mark.parametrize("detail", [True, False])
def test_results_are_compared_and_reported_as_those_of_bench(machines, tmp_path, detail) -> None:
    paths = []
    for rate in (5.0, 50.0):
        result = simulated(machines["gpu"], rate=rate, figures={"detail": detail}, label=f"{rate:g}")
        paths.append(tmp_path / f"{rate:g}.json")
        save(result, paths[-1])
    results = [load(path) for path in paths]
    rows = {figure.name for figure in side_by_side(results).figures}
    assert {"Requests/s", "Mean TTFT (ms)", "P95 TPOT (ms)", "Mean queue (ms)"} <= rows
    page = write_report(results, tmp_path / "report.html").read_text()
    assert "Time to First Token" in page
    plots = {path.stem for path in (tmp_path / "report-plots").iterdir()}
    assert "kv-usage" in plots
    assert ("ttft-over-time" in plots) == detail


# -- description of the run in its result


def test_a_result_tells_what_was_simulated(machines, tmp_path) -> None:
    trace = written(tmp_path, "0,10,5", "2,10,5")
    result = simulated(machines["gpu"], trace=trace, cluster="2x2", tp=2, slo_ttft=0.5, model="llama-3-8b", label="x")
    assert result["kind"] == "trace"
    assert result["simulated"] is True
    told = ("hardware", "cluster", "tp", "pp", "dp", "policy", "model_id", "label", "num_prompts", "request_rate")
    assert [result[key] for key in told] == ["test-gpu", "2x2", 2, 1, 2, "static", "llama-3-8b", "x", 2, 1.0]
    assert result["slo"] == {"ttft": 500.0}
    assert result["slo_attainment"] == 1
    assert result["workload"]["trace"] == "trace"
    assert simulated(machines["gpu"])["kind"] == "serve"


def test_prompts_that_share_are_cached_unless_told_otherwise(machines) -> None:
    dataset = SMALL | {"prefix_len": 320}
    shared = simulated(machines["gpu"], model="llama-3-8b", dataset=dataset)
    alone = simulated(machines["gpu"], model="llama-3-8b", dataset=dataset, prefix_caching=False)
    assert (shared["prefix_caching"], alone["prefix_caching"]) == (True, False)
    assert shared["mean_ttft_ms"] < alone["mean_ttft_ms"]
    assert simulated(machines["gpu"])["prefix_caching"] is False


def test_caching_of_prompts_that_share_nothing_finds_nothing(machines) -> None:
    cached, plain = (simulated(machines["gpu"], model="llama-3-8b", prefix_caching=on) for on in (True, False))
    assert cached["prefix_caching"]
    assert cached["ttfts"] == plain["ttfts"]


def test_after_ctrl_c_there_is_what_had_ended(machines, monkeypatch) -> None:
    class Pressed(running.RequestColumns):
        def take(self, answered) -> None:
            if (~(self.last_s != self.last_s)).sum() == 20:
                raise KeyboardInterrupt
            super().take(answered)

    monkeypatch.setattr(running, "RequestColumns", Pressed)
    result = simulated(machines["gpu"], figures={"detail": False})
    assert result["interrupted"]
    assert (result["completed"], result["unfinished"]) == (20, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": None}, "no hardware is given"),
        ({"hardware": "b9000"}, "unknown hardware 'b9000'"),
        ({"model": "llama-9"}, "model 'llama-9'"),
        ({"cluster": "4", "tp": 3}, "--cluster has 4 devices: it must be a multiple of tp x pp = 3 x 1"),
        ({"cluster": "2y2"}, "--cluster is '2y2': give a number of devices"),
        ({"cluster": "0"}, "--cluster is '0'"),
        ({"tp": 0}, "tp is 0"),
        ({"kv_pages": -3}, "kv_pages is -3"),
        ({"precision": "int5"}, "precision is 'int5'"),
        ({"figures": {"metrics_interval": -1.0}}, "--metrics-interval is -1 s"),
        ({"figures": {"goodput": ["ttft"]}}, "--goodput has 'ttft'"),
    ],
)
def test_options_that_make_no_sense_are_refused(machines, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(**{"hardware": machines["gpu"]} | options)
