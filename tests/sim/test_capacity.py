"""`jaxserve sim plan`: the cheapest plans that meet objectives in percentiles."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxserve.bench.options import ArrivalOptions, TraceOptions
from jaxserve.bench.traces.trace import Trace
from jaxserve.cli.main import app
from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import ConfigError
from jaxserve.core.progress import ignore_progress
from jaxserve.server.options import read_config, resolve
from jaxserve.sim.capacity.bounds import Bounds
from jaxserve.sim.capacity.candidates import Candidates, Fitting
from jaxserve.sim.capacity.evaluate import evaluate
from jaxserve.sim.capacity.load import PlannedLoad, arguments_of, requests_at
from jaxserve.sim.capacity.objectives import Objective, measure, parse_objectives, percentile_of
from jaxserve.sim.capacity.options import PlanOptions
from jaxserve.sim.capacity.plan import make_answer
from jaxserve.sim.capacity.search import Search, search_hardware
from jaxserve.sim.hardware import to_yaml
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.request_columns import RequestColumns
from jaxserve.sim.run import cluster_of
from tests.sim.machines import GPU

# A device on which a model of 8B fits alone, and one that needs another one for it.
LARGE = replace(
    GPU, name="large", memory=24 << 30, bandwidth=1e12, rates=dict.fromkeys(GPU.rates, 100e12), devices_per_host=2
)
SMALL = replace(LARGE, name="small", memory=12 << 30)
LOAD = {"num_prompts": 100, "input_len": "uniform:100,900", "output_len": "uniform:20,120"}
BASE = ClusterOptions(model="llama-3-8b")


@pytest.fixture
def machines(tmp_path: Path) -> dict[str, str]:
    """Return the hardware files of these tests by name."""
    for hardware in (LARGE, SMALL):
        (tmp_path / f"{hardware.name}.yaml").write_text(to_yaml(hardware))
    return {name: str(tmp_path / f"{name}.yaml") for name in ("large", "small")}


def answer_of(
    hardware: str, *goodput: str, rate: float = 12.0, requests: int = 100, base: ClusterOptions = BASE, **options
):
    options = {"policies": "static", "precisions": "auto", "jobs": 1} | options
    search = PlanOptions(goodput=list(goodput), hardware=hardware, **options)
    load = LOAD | {"num_prompts": requests}
    return make_answer(search, base, load, ArrivalOptions(request_rate=rate), TraceOptions(), ignore_progress)


def search_of(hardware: str, objectives: str, *, rate: float = 12.0, until: float = math.inf, **more) -> Search:
    candidates = Candidates(BASE, parse_objectives([objectives], 95), (None,), ("static",), 0.05, False)
    load = PlannedLoad.of(LOAD, ArrivalOptions(request_rate=rate), TraceOptions())
    return Search(replace(candidates, **more), load, 16, until)


def invoked(*args: str):
    return CliRunner().invoke(app, ["sim", "plan", *args])


# -- objectives


def test_objectives_are_limits_on_percentiles() -> None:
    assert parse_objectives(["ttft:2000 tpot:p99:50", "e2el:9000"], 95) == (
        Objective("ttft", 95, 2000),
        Objective("tpot", 99, 50),
        Objective("e2el", 95, 9000),
    )
    both = parse_objectives(["ttft:p50:500,ttft:2000"], 95)
    assert [str(each) for each in both] == ["P50 TTFT of at most 500 ms", "P95 TTFT of at most 2,000 ms"]
    for wrong in ("ttft", "ttft:0", "itl:5", "ttft:p100:5", "ttft:1 ttft:2", ""):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_objectives([wrong], 95)


def test_requests_that_are_refused_or_do_not_end_in_time_miss_every_objective() -> None:
    columns = RequestColumns(Trace.of("t", np.zeros(10), np.full(10, 5), np.full(10, 3)))
    columns.first_s[:], columns.last_s[:] = 1.0, 2.0
    objectives = parse_objectives(["ttft:p90:1000 tpot:p80:500 e2el:p50:2000"], 95)
    assert measure(columns, objectives, 60) == pytest.approx((1000, 500, 2000))
    columns.refused[0] = True
    columns.last_s[1] = 61.0  # after the end of the run
    columns.last_s[2] = math.nan  # never
    assert measure(columns, objectives, 60) == pytest.approx((math.inf, math.inf, 2000))


def test_percentiles_are_those_of_bench_also_with_misses() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert percentile_of(values, 95) == pytest.approx(np.percentile(values, 95))
    assert percentile_of(np.array([1.0, 2.0, math.inf, math.inf]), 95) == math.inf
    assert percentile_of(np.array([1.0, 2.0, 3.0, math.inf]), 50) == pytest.approx(2.5)
    assert percentile_of(np.array([]), 95) == 0


# -- the load


def test_a_rate_alone_is_a_load_long_enough_for_percentiles() -> None:
    load = PlannedLoad.of({}, ArrivalOptions(), TraceOptions(rate=4.0))
    assert [*arguments_of(load.dataset), *arguments_of(load.arrivals)] == [
        "--num-prompts",
        "1200",
        "--request-rate",
        "4",
    ]
    assert len(load.workload()) == 1200
    assert load.workload(2.0).trace.duration_s == pytest.approx(load.workload().trace.duration_s / 2)
    assert [requests_at(rate) for rate in (0.1, 4, 100)] == [200, 1200, 6000]
    with pytest.raises(ConfigError, match="no load is given"):
        PlannedLoad.of({}, ArrivalOptions(), TraceOptions())


# -- the search


def test_the_smallest_number_of_instances_is_found_and_one_less_does_not_do(machines) -> None:
    answer = answer_of(machines["large"], "ttft:400 tpot:45")
    (best,) = [plan for plan in answer.plans if plan.candidate.tp == 1]
    meets = {}
    for instances in range(1, best.instances + 2):
        options = best.candidate.options(BASE, answer.objectives, instances, 0.05)
        meets[instances] = evaluate(
            cluster_of(options, prefix_caching=False), answer.load.workload(), answer.objectives
        ).meets
    assert best.instances > 1
    assert meets == {instances: instances >= best.instances for instances in meets}
    assert "P95 T" in best.fewer


def test_the_printed_command_simulates_the_plan_with_the_same_figures(machines, tmp_path) -> None:
    answer = answer_of(machines["large"], "ttft:400 tpot:45", percentile=97.0)
    plan, saved = answer.plans[0], tmp_path / "again.json"
    words = answer.command(plan)
    assert words[:2] == ["jaxserve", "sim"]
    done = CliRunner().invoke(app, [*words[1:], "--quiet", "--save-result", str(saved)])
    assert done.exit_code == 0, done.output
    result = json.loads(saved.read_text())
    assert [result["p97_ttft_ms"], result["p97_tpot_ms"]] == pytest.approx(plan.evaluation.figures)
    assert result["failed"] == result["unfinished"] == plan.evaluation.missed == 0


def test_the_margin_is_the_rate_up_to_which_the_objectives_hold(machines) -> None:
    answer = answer_of(machines["large"], "ttft:400 tpot:45")
    plan = answer.plans[0]
    cluster = cluster_of(answer.cluster_options(plan), prefix_caching=False)
    assert 1 <= plan.speed < 4
    assert evaluate(cluster, answer.load.workload(plan.speed), answer.objectives).meets
    assert not evaluate(cluster, answer.load.workload(plan.speed + 0.05), answer.objectives).meets
    assert plan.limit


def test_stages_are_considered_where_a_degree_alone_does_not_fit(machines) -> None:
    candidates = search_of(machines["small"], "ttft:2000").candidates
    found = [each.candidate for each in candidates.on(machines["small"], 8) if isinstance(each, Fitting)]
    assert [(each.tp, each.pp) for each in found] == [(1, 2), (2, 1)]


def test_a_model_that_does_not_fit_is_rejected_without_simulating(machines) -> None:
    tiny = replace(SMALL, memory=1 << 30)
    Path(machines["small"]).write_text(to_yaml(tiny))
    found = search_hardware(search_of(machines["small"], "ttft:2000"), machines["small"], 1.0)
    assert not found.plans
    assert not found.simulations
    assert all("needs at least" in each.reason for each in found.rejections)


def test_a_policy_whose_precisions_the_hardware_lacks_is_rejected(machines) -> None:
    known = {
        "rates": {"bfloat16": 1e14},
        "efficiency": {name: LARGE.efficiency[name] for name in ("bfloat16", "attention")},
    }
    Path(machines["large"]).write_text(to_yaml(replace(LARGE, **known)))
    candidates = search_of(machines["large"], "ttft:2000", policies=("static", "morph")).candidates
    found = list(candidates.on(machines["large"], 1))
    assert [isinstance(each, Fitting) for each in found] == [True, False]
    assert "lacks 'int4'" in found[1].reason or "lack 'int4'" in found[1].reason


def test_an_objective_below_the_time_of_a_single_request_is_rejected_without_simulating(machines) -> None:
    found = search_hardware(search_of(machines["large"], "tpot:3"), machines["large"], 1.0)
    assert not found.plans
    assert not found.simulations
    for each in found.rejections:
        assert each.reason.startswith("P95 TPOT cannot be below ")
    found = search_hardware(search_of(machines["large"], "ttft:5"), machines["large"], 1.0)
    assert not found.simulations


def test_requests_that_are_too_long_for_the_model_are_named_without_simulating(machines) -> None:
    answer = answer_of(machines["large"], "ttft:9000", base=replace(BASE, max_model_len=150))
    assert (answer.plans, answer.found.simulations) == ([], 0)
    reason = answer.found.rejections[-1].reason
    assert re.fullmatch(r"\d+ of 100 requests are refused: they have up to .* and a sequence 150 \(.*", reason)


def test_requests_that_are_refused_within_the_percentile_are_told(machines, tmp_path) -> None:
    words = ["--hardware", machines["large"], "--model", "llama-3-8b", "--policies", "static", "--precisions", "auto"]
    load = ["--num-prompts", "60", "--rate", "2", "--input-len", "uniform:100,900", "--max-model-len", "900"]
    done = CliRunner().invoke(app, ["sim", "plan", *words, *load, "--goodput", "ttft:p50:9000"])
    found = re.search(r"(\d+) of \d+ requests miss the objectives: they are refused, or do not end", done.output)
    assert found, done.output
    assert int(found[1]) > 0


def test_no_request_is_faster_than_the_bounds_say(machines) -> None:
    search = search_of(machines["large"], "ttft:400 tpot:45", rate=0.5)
    workload = search.load.workload()
    for each in search.candidates.on(machines["large"], 4):
        assert isinstance(each, Fitting)
        bounds = Bounds.of(each.cluster, workload)
        objectives = parse_objectives(["ttft:p50:1 tpot:p50:1 ttft:p95:1 tpot:p95:1"], 95)
        seen = evaluate(each.cluster, workload, objectives).figures
        floors = [np.percentile(values, q) * 1e3 for q in (50, 95) for values in (bounds.ttft, bounds.tpot)]
        assert all(floor <= figure for floor, figure in zip(floors, seen, strict=True)), each.candidate
        assert max(floor / figure for floor, figure in zip(floors, seen, strict=True)) > 0.7  # and they say something


def test_a_load_that_outgrows_the_devices_is_said_with_what_limits_them(machines) -> None:
    search = replace(search_of(machines["large"], "ttft:400", rate=40.0), max_devices=1)
    (rejected,) = search_hardware(search, machines["large"], 1.0).rejections
    assert rejected.reason.startswith("P95 TTFT ")
    assert "with 1 device" in rejected.reason
    assert "limited by " in rejected.reason


def test_the_search_ends_with_its_time(machines) -> None:
    search = search_of(machines["large"], "ttft:400 tpot:45", until=10.0)
    found = search_hardware(search, machines["large"], 1.0, clock=VirtualClock(11.0))
    assert not found.simulations
    assert any("--budget" in each.reason for each in found.rejections)


def test_equal_options_give_equal_plans_with_any_number_of_processes(machines) -> None:
    both = ",".join(machines.values())
    one, two = (
        answer_of(both, "ttft:2000 tpot:60", rate=1.0, requests=30, jobs=jobs, max_devices=2) for jobs in (1, 2)
    )
    assert [(plan, plan.evaluation) for plan in one.found.plans] == [(p, p.evaluation) for p in two.found.plans]
    assert one.found.rejections == two.found.rejections


def test_the_cheapest_hardware_comes_first(machines) -> None:
    large, small = machines["large"], machines["small"]
    for price, first in ((f"{large}=1,{small}=0.6", large), (f"{large}=1,{small}=0.4", small)):
        answer = answer_of(f"{large},{small}", "ttft:2000 tpot:100", rate=1.0, requests=30, price=price, max_devices=2)
        assert answer.plans[0].candidate.hardware == first
        assert [plan.cost for plan in answer.plans] == sorted(plan.cost for plan in answer.plans)
    with pytest.raises(ConfigError, match="--price has no price for"):
        answer_of(f"{large},{small}", "ttft:2000", price=f"{large}=1")


def test_precisions_below_the_floor_of_quality_are_left_out(machines) -> None:
    answer = answer_of(
        machines["small"], "ttft:2000 tpot:100", rate=1.0, requests=30, precisions="auto,int8,int4", max_devices=2
    )
    assert answer.plans[0].candidate.precision == "int8"  # one device holds the model
    assert any(each.what.startswith("int4") and "--max-quality-loss" in each.reason for each in answer.found.rejections)
    strict = replace(BASE, max_quality_loss=0.0)
    answer = answer_of(
        machines["small"], "ttft:2000 tpot:100", rate=1.0, precisions="auto,int8", base=strict, max_devices=2
    )
    assert {plan.candidate.precision for plan in answer.plans} == {None}


def test_a_policy_that_has_nothing_to_do_is_not_chosen_and_says_why(machines) -> None:
    answer = answer_of(machines["large"], "ttft:400 tpot:45", policies="static,morph")
    assert answer.plans[0].candidate.policy == "static"
    morph = [each for each in answer.found.rejections if each.what.endswith("morph")]
    assert morph
    done = invoked("--model", "llama-3-8b", "--hardware", machines["large"], "--goodput", "ttft:2000", "--rate", "1",
                   "--num-prompts", "30", "--precisions", "auto", "--jobs", "1")  # fmt: skip
    assert "static is enough" in done.output


# -- the command


def test_saved_options_start_the_plan(machines, tmp_path) -> None:
    saved, result = tmp_path / "serve.yaml", tmp_path / "plan.json"
    done = invoked("--model", "llama-3-8b", "--hardware", machines["small"], "--goodput", "ttft:2000", "tpot:p90:60",
                   "--rate", "2", "--num-prompts", "60", "--policies", "static,morph", "--jobs", "1",
                   "--save-plan", str(saved), "--save-result", str(result), "--max-model-len", "2048")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert f"start it: jaxserve serve --config {saved}" in done.output
    assert "simulated: predicted by" in done.output
    plan = json.loads(result.read_text())["plans"][0]
    engine, _ = resolve(read_config(saved), {})
    assert (engine.tp, engine.pp, engine.dp) == (plan["tp"], plan["pp"], plan["instances"])
    assert engine.precision == "int8"
    assert engine.max_model_len == 2048
    words = shlex.split(plan["simulate"])
    assert words[words.index("--cluster") + 1] == str(plan["devices"])
    assert plan["figures_ms"].keys() == {"P95 TTFT", "P90 TPOT"}


def test_json_is_printed_alone(machines) -> None:
    done = invoked("--model", "llama-3-8b", "--hardware", machines["large"], "--goodput", "ttft:9", "--rate", "1",
                   "--num-prompts", "30", "--jobs", "1", "--json")  # fmt: skip
    assert done.exit_code == 1  # no plan meets the objectives
    found = json.loads(done.stdout)
    assert found["plans"] == []
    assert found["simulated"]
    assert found["rejected"]


def test_mistakes_are_told_in_a_line(machines) -> None:
    large = machines["large"]
    for words, message in (
        (("--rate", "1"), "no objective is given"),
        (("--goodput", "ttft:100"), "no load is given"),
        (("--goodput", "ttft:100", "--rate", "1", "--precisions", "fp4"), "precisions is 'fp4'"),
        (("--goodput", "ttft:100", "--rate", "1", "--policies", "magic"), "policy is 'magic'"),
        (("--goodput", "ttft:100", "--rate", "1", "--price", "l4"), "--price has 'l4'"),
    ):
        done = invoked("--model", "llama-3-8b", "--hardware", large, *words)
        assert done.exit_code == 1
        assert message in done.output
        assert "Traceback" not in done.output


def test_the_question_of_the_manual_is_answered(tmp_path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^jaxserve (sim plan --model.*)$", page, re.MULTILINE)
    for old, new in (
        ("--duration 300", "--duration 10 --max-devices 4 --jobs 1 --policies static"),
        ("l4=0.8,a100-80=1.8,", ""),
        ("plan.yaml", str(tmp_path / "plan.yaml")),
    ):
        assert old in command
        command = command.replace(old, new)
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    best = re.search(r"^h[12]00 +\d+ +(\d+) x tp (\d+) ", done.output, re.MULTILINE)
    assert best is not None
    engine, _ = resolve(read_config(tmp_path / "plan.yaml"), {})
    assert (engine.dp, engine.tp) == (int(best[1]), int(best[2]))
