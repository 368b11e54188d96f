"""bench.gpu: a complete run on a CPU at tiny sizes, its arithmetic, and parts that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu import write
from bench.gpu_parts import costs, transitions
from bench.gpu_parts.bursts import arrivals
from bench.gpu_parts.kernels import Case, cases
from bench.gpu_parts.measure import BELOW_NOISE, decode
from bench.gpu_parts.parts import DEFAULT_PARTS as PARTS, Outcome, Part, Settings, run_in_turns, run_part, run_parts
from bench.gpu_parts.sizes import REAL, TINY
from bench.gpu_parts.table import ceilings, reached, table, with_shares
from bench.gpu_parts.targets import targets, targets_table
from bench.gpu_parts.worker import ensure_model, shortened
from bench.peers.checkpoints import _parts
from jaxserve import kernels
from jaxserve.core.kv_layout import SCALE_BYTES, int8_row_bytes
from pallas_kernels.quantized_matmul import MAX_ROWS
from tests.support.thorough import THOROUGH, some

ROOT = Path(__file__).resolve().parents[2]
NO_OPERATIONS = {  # of jaxserve.kernels: nothing to time, or on GPU only others in turn
    "AllReduce", "AttentionMeta", "DeferredNorm", "DeferredSwiGLU", "HeadNorms", "LeftOperand", "Pool", "ProjectedQKV",
    "value_of",
    "GRANULE", "committed_bytes", "is_elastic", "kv_pool", "move_pages", "page_bytes", "pool_shape", "put_pages",
    "release_pages", "reserving", "storage_dtype", "take_pages", "write_and_attend",
}  # fmt: skip
PARTS_ASKED_FOR = ("samplers", "products", "steps", "bursts", "threads")
WEB = ("fastapi", "starlette", "uvicorn", "pydantic")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """Return the JSON and the output of a complete tiny run in which no web framework can be imported."""
    if not THOROUGH:
        pytest.skip("make test-thorough runs it: engines of two models are compiled in every precision")
    folder = tmp_path_factory.mktemp("gpu")
    for name in WEB:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not there', name='{name}')")
    out = folder / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu", "--platform", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--cache-dir", str(folder / "cache"), "--out", str(out)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=460,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def rows(report: tuple[dict, str], part: str) -> list[dict]:
    return report[0]["parts"][part]["rows"]


def test_gpu_run_has_every_part_except_missing_peers(report):
    outcomes = report[0]["parts"]
    assert list(outcomes) == [part.name for part in PARTS]
    for part in PARTS:
        assert outcomes[part.name]["status"] in (("ok", "skipped") if part.is_peer else ("ok",)), outcomes[part.name]
    errors = {row["error"] for outcome in outcomes.values() for row in outcome["rows"] if "error" in row}
    assert errors <= {BELOW_NOISE}, "that, a busy machine may do to the smallest steps"


def test_gpu_rows_with_a_floor_have_their_share_of_it(report):
    for part in ("kernels", "engine:1b", "engine:8b"):
        with_floor = [row for row in rows(report, part) if "bytes" in row and "seconds" in row]
        assert with_floor
        assert all(row["of_ceiling"] > 0 and row["bound"] in ("memory", "arithmetic") for row in with_floor)


@pytest.mark.parametrize("model", TINY.models, ids=lambda model: model.name)
def test_gpu_model_is_measured_through_library_and_executor_in_both_tiers(report, model):
    found = {(row.get("through"), row.get("tier")) for row in rows(report, f"engine:{model.name}") if "tok_s" in row}
    assert found == {("LLM", "block"), ("executor", "block"), ("executor", "fused")}
    cases = [row["case"] for row in rows(report, f"engine:{model.name}") if row.get("through") == "LLM"]
    assert {f"decode, batch {batch}" for batch in model.batches} <= set(cases)
    fused = [row["count"] for row in rows(report, f"engine:{model.name}") if row["case"].endswith("fused tier")]
    assert fused[0] > 0, "the fused tier was really there"


def test_gpu_table_has_every_row(report):
    measured = [row for o in report[0]["parts"].values() for row in o["rows"] if row["case"] != "first_tokens"]
    for row in measured:
        assert f"| {row['case']}" in report[1]
    assert report[0]["environment"]["cpu"] in report[1]


def test_gpu_report_lists_every_target(report):
    assert {target["verdict"] for target in report[0]["targets"]} <= {"met", "missed", "not measured"}
    for target in report[0]["targets"]:
        assert f"| {target['name']} |" in report[1]


def test_gpu_layers_in_fewer_bits_read_fewer_bytes(report):
    for tier in ("block", "fused"):
        whole, int8, int4 = (
            next(r for r in rows(report, "engine:8b") if (r["case"], r.get("tier")) == (f"decode, batch 2{form}", tier))
            for form in ("", ", layers in int8", ", layers in int4")
        )
        assert whole["bytes"] > int8["bytes"] > int4["bytes"]
        assert whole["flops"] == int4["flops"]


def test_gpu_cases_cover_every_kernel_operation():
    assert {case.op for case in cases(REAL)} == set(kernels.__all__) - NO_OPERATIONS
    assert {case.op for case in cases(TINY)} == {case.op for case in cases(REAL)}


def as_on_gpu(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return an input with its dtype on GPU, where pools store rows in another way."""
    if leaf.ndim == 5 and leaf.dtype == jnp.uint16:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)
    if leaf.ndim == 5 and leaf.dtype == jnp.int8:
        return jax.ShapeDtypeStruct((*leaf.shape[:-1], int8_row_bytes(leaf.shape[-1] - SCALE_BYTES, "gpu")), jnp.int8)
    return leaf


def is_for_pallas(case: Case) -> bool:
    """Return whether a Pallas kernel runs a case: attention, and products of not too many rows in 8 or 4 bits."""
    quantised = " in int" in case.case and int(case.case.split()[-2]) <= MAX_ROWS[4 if "int4" in case.case else 8]
    return case.op == "paged_attention" or (case.op == "matmul" and quantised)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_gpu_cases_lower_for_cuda_at_real_sizes(backend):
    """Every case is lowered as on a Hopper GPU: with Pallas kernels where they apply, and with XLA alone."""
    for case in some(cases(REAL, (backend,)), 12):
        inputs = jax.tree.map(as_on_gpu, jax.eval_shape(case.inputs, jax.random.key(0)))
        result = jax.eval_shape(case.call, *inputs)
        text = jax.jit(case.call).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == (backend == "pallas" and is_for_pallas(case)), case.case
        if case.donate:
            assert jax.tree.leaves(result) == jax.tree.leaves(inputs[0]), "goes round"


def test_gpu_cases_of_the_engines_kernels_come_before_xla():
    both = [case.case for case in cases(REAL, ("pallas", "xla"))]
    assert len(both) == len(set(both)), "no two cases are called alike"
    beside = [case.endswith(", by XLA") for case in both]
    assert any(beside)
    assert beside == sorted(beside)


@pytest.mark.parametrize("model", [*REAL.models, *TINY.models], ids=lambda model: model.name)
def test_decode_cost_reads_every_weight_but_the_embedding(model):
    tensors = {name: prod(dims) for _, part in _parts(model.shape) for name, dims in part.items() if len(dims) == 2}
    embedding = tensors.pop("model.embed_tokens.weight")
    weights = sum(tensors.values())
    one, two = costs.decode(model, 1, 0), costs.decode(model, 2, 0)
    assert two.flops == 2 * one.flops == 4 * weights
    new_token = model.shape.layers * costs.token_bytes(model)
    assert one.bytes == 2 * weights + new_token
    assert embedding == model.shape.vocab * model.shape.hidden
    assert two.bytes - one.bytes == new_token


def test_prefill_operations_equal_those_of_single_tokens():
    model = REAL.models[0]
    decoded = sum(costs.decode(model, 1, context).flops for context in range(1, 65))
    head = 2 * model.shape.hidden * model.shape.vocab
    assert costs.prefill(model, 1, 64).flops == decoded - 63 * head


class Answers:
    """An engine whose generations take the given seconds, one after the other, on a clock that tests patch."""

    def __init__(self, seconds: list[float]) -> None:
        self.now, self.seconds = 0.0, iter(seconds)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        self.now += next(self.seconds)
        return [[0] * max_tokens for _ in prompts]

    def settle(self) -> bool:
        return False


@pytest.mark.parametrize("whole", [3.0, 1.0, 0.5])
def test_decode_step_is_a_difference_of_times_or_an_error(monkeypatch, whole):
    engine = Answers([9.0, 1.0, 9.0, whole])  # an unmeasured run before each
    monkeypatch.setattr(time, "perf_counter", lambda: engine.now)
    model = replace(TINY.models[0], batches=(2,))
    (row,) = decode(engine, model, TINY, np.random.default_rng(0), {"through": "LLM"})
    assert row["bytes"] > 0
    if whole > 1:
        assert (row["seconds"], row["tok_s"]) == (2 / TINY.steps, TINY.steps)
    else:
        assert row["error"] == BELOW_NOISE
        assert "seconds" not in row


OUTCOMES = {
    "ceilings": Outcome("ok", rows=[
        {"case": "copy", "bytes": 400, "seconds": 1.0},
        {"case": "matmul bfloat16", "flops": 1000, "dtype": "bfloat16", "seconds": 0.5},
        {"case": "matmul int8", "error": "refused", "dtype": "int8", "flops": 1000},
    ]),
    "kernels": Outcome("ok", rows=[
        {"op": "matmul", "case": "a", "bytes": 400, "flops": 10, "dtype": "bfloat16", "seconds": 4.0},
        {"op": "matmul", "case": "b", "bytes": 4, "flops": 4000, "dtype": "bfloat16", "seconds": 4.0},
        {"op": "matmul", "case": "c", "bytes": 4, "flops": 4000, "dtype": "bfloat16", "error": "out of memory"},
    ]),
    "checkpoint": Outcome("ok", rows=[{"case": "written", "model": "1b"}]),
    "engine:1b": Outcome("out of time", "ended after 5 s", rows=[
        {"case": "decode, batch 1", "model": "1b", "through": "LLM", "tier": "block", "seconds": 0.3},
        {"case": "decode, batch 1", "model": "1b", "through": "LLM", "tier": "fused", "seconds": 0.1},
        {"case": "first_tokens", "model": "1b", "through": "LLM", "tokens": [1, 2, 3, 4]},
    ]),
    "peer:1b": Outcome("ok", rows=[
        {"case": "decode, batch 1", "model": "1b", "through": "transformers", "seconds": 0.2},
        {"case": "first_tokens", "model": "1b", "through": "transformers", "tokens": [1, 2, 3, 5]},
    ]),
}  # fmt: skip


def test_shares_are_relative_to_the_measured_ceilings():
    limits = ceilings(OUTCOMES)
    assert limits == {"copy": 400, "bfloat16": 2000}
    memory, arithmetic, failed = OUTCOMES["kernels"].rows
    assert reached(memory, limits) == 0.25
    assert reached(arithmetic, limits) == 0.5
    assert reached(failed, limits) is None
    with_shares(OUTCOMES)
    assert (memory["bound"], arithmetic["bound"]) == ("memory", "arithmetic")


def test_gpu_table_shows_failures_peer_and_agreement():
    text = table(OUTCOMES)
    assert "c, out of memory" in text
    assert "- engine:1b: out of time: ended after 5 s" in text
    assert "| 1b | decode, batch 1 | fused | 100 ms | 200 ms | 2.00x |" in text
    assert "first tokens equal to Transformers', 1b: 3 of 4" in text
    assert table({"kernels": OUTCOMES["kernels"]}), "a table without ceilings"


def run_script(code: str, limit: float = 60) -> Outcome:
    outcome = Outcome()
    run_part([sys.executable, "-c", code], dict(os.environ), limit, outcome, lambda: None)
    return outcome


READY = """
import json
from bench.gpu_parts.turns import wait_for_turn
wait_for_turn()
print(json.dumps({"end": "ok"}), flush=True)
"""
ROW = 'print(\'{"row": {"case": "first"}}\', flush=True)\n'


def test_gpu_part_that_hangs_is_killed_and_keeps_its_rows():
    outcome = run_script(ROW + "import time; time.sleep(600)", limit=3)
    assert (outcome.status, outcome.rows) == ("out of time", [{"case": "first"}])


def test_gpu_part_that_crashes_keeps_its_rows_and_log():
    outcome = run_script(ROW + "import os, sys; sys.stderr.write('no device'); sys.stderr.flush(); os.abort()")
    assert (outcome.status, outcome.rows) == ("crashed", [{"case": "first"}])
    assert f"exit status {-signal.SIGABRT}" in outcome.why
    assert "no device" in outcome.why


def test_interrupt_kills_a_gpu_part_and_its_children(tmp_path: Path):
    file = tmp_path / "pid"
    child = f"import os, time; print(os.getpid(), file=open({str(file)!r}, 'w'), flush=True); time.sleep(600)"
    code = f"""
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}])
while not (pathlib.Path({str(file)!r}).exists() and pathlib.Path({str(file)!r}).read_text()):
    time.sleep(0.05)
{ROW}
time.sleep(600)
"""

    def interrupt() -> None:
        raise KeyboardInterrupt

    outcome = Outcome()
    with pytest.raises(KeyboardInterrupt):
        run_part([sys.executable, "-c", code], dict(os.environ), 120, outcome, interrupt)
    assert (outcome.status, outcome.rows) == ("interrupted", [{"case": "first"}])
    status = Path(f"/proc/{int(file.read_text())}/stat")
    for _ in range(200):
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("what the part has started is still there")


def test_gpu_part_that_fails_does_not_affect_others(tmp_path: Path):
    settings = Settings("cpu", tiny=True, cache=tmp_path, python=sys.executable, peer_python=sys.executable)
    outcomes: dict[str, Outcome] = {}
    changes: list[str] = []
    run_parts((Part("nonsense", 60), Part("checkpoint", 60)), settings, outcomes, changes.append)
    assert outcomes["nonsense"].status == "failed"
    assert "unknown part 'nonsense'" in outcomes["nonsense"].why
    assert outcomes["checkpoint"].status == "ok"
    assert changes.count("checkpoint") == len(TINY.models) + 1


def test_gpu_part_without_time_is_not_started(tmp_path: Path):
    settings = Settings("cpu", tiny=True, cache=tmp_path, python=sys.executable, peer_python=sys.executable)
    outcomes: dict[str, Outcome] = {}
    run_parts((Part("checkpoint", 1),), settings, outcomes, lambda name: None)
    assert (outcomes["checkpoint"].status, outcomes["checkpoint"].why) == ("not started", "no time was left")


MODEL = {"model": "8b", "tier": "block", "bytes": 800, "flops": 1600}
MET = {
    "ceilings": Outcome("ok", rows=[
        {"case": "copy", "bytes": 1000, "seconds": 1.0},
        {"case": "matmul bfloat16", "flops": 2000, "dtype": "bfloat16", "seconds": 1.0},
    ]),
    "kernels": Outcome("ok", rows=[
        {"op": "paged_attention", "case": "8b decode, 64 x 4096", "bytes": 810, "seconds": 1.0},
        {"op": "matmul", "case": "8b gate_up in int4, 1 rows", "bytes": 740, "seconds": 1.0},
        {"op": "matmul", "case": "8b gate_up, 1 rows", "bytes": 2800, "seconds": 3.1},
        {"op": "matmul", "case": "8b gate_up in int4, 2 rows", "error": "refused"},
    ]),
    "engine:8b": Outcome("out of time", rows=[
        {**MODEL, "case": "decode, batch 1", "through": "executor", "seconds": 1.25},
        {**MODEL, "case": "decode, batch 1, layers in int4", "through": "executor", "bytes": 250, "seconds": 0.4},
        {**MODEL, "case": "decode, batch 1", "through": "executor", "tier": "fused", "seconds": 0.9},
        {**MODEL, "case": "prefill step, 2048 tokens", "through": "executor", "seconds": 1.5},
    ]),
}  # fmt: skip


def test_targets_are_met_missed_or_not_measured():
    found = {t.name: (t.measured and round(t.measured, 2), t.tier, t.verdict) for t in targets(MET)}
    copy = ", of the copy bandwidth"
    assert found[f"paged decode attention, 8b decode, 64 x 4096{copy}"] == (81, "", "met")
    assert found[f"8b gate_up in int4, 1 rows{copy}"] == (74, "", "missed")
    assert found[f"8b gate_up in int4, 2 rows{copy}"] == (None, "", "not measured"), "it failed"
    assert found["8b gate_up in int4, 1 rows, beside bfloat16"] == (3.1, "", "met")
    assert found["8b gate_up in int4, 2 rows, beside bfloat16"] == (None, "", "not measured")
    assert found[f"8b, all products of a layer in int4, 1 rows{copy}"] == (None, "", "not measured"), "one of four"
    assert found[f"8b decode, batch 1, executor{copy}"] == (88.89, "fused", "met")
    assert found[f"8b decode, batch 1, LLM{copy}"] == (None, "", "not measured")
    assert found[f"8b decode, batch 1, layers in int4, executor{copy}"] == (62.5, "block", "missed")
    beside = found["8b decode, batch 1, layers in int4, executor, beside bfloat16"]
    assert beside == (3.12, "block", "met"), "both in one tier"
    prefill = found["8b prefill step, 2048 tokens, executor, of the bfloat16 products' rate"]
    assert prefill == (53.33, "block", "missed")
    text = targets_table(MET)
    assert "at least 80 % | 81 % |  | met |" in text
    assert "at least 3x | 3.1x |  | met |" in text
    assert {t.verdict for t in targets({})} == {"not measured"}


def test_every_target_is_measured_by_a_complete_run():
    """With every kernel case and engine row at 1 second, no target remains unmeasured."""
    kernel = [{"op": case.op, "case": case.case, **case.cost.fields, "seconds": 1.0} for case in cases(REAL)]
    model = REAL.models[-1]
    steps = ["", *(f", layers in {precision}" for precision in model.precisions)]
    (count, length), tokens = max(REAL.prefills), REAL.step_tokens
    engine = [
        *({**MODEL, "case": f"decode, batch {model.batches[0]}{form}", "through": "executor"} for form in steps),
        {**MODEL, "case": f"decode, batch {model.batches[0]}", "through": "LLM"},
        {**MODEL, "case": f"prefill step, {tokens} tokens", "through": "executor"},
        {**MODEL, "case": f"prefill, {count} x {length}", "through": "LLM"},
    ]
    whole = MET | {
        "kernels": Outcome("ok", rows=kernel),
        f"engine:{model.name}": Outcome("ok", rows=[{**row, "seconds": 1.0} for row in engine]),
    }
    assert [t.name for t in targets(whole) if t.measured is None] == []


def test_gpu_parts_take_less_than_eight_minutes():
    assert sum(part.seconds for part in PARTS) < 8 * 60


def test_gpu_report_is_replaced_atomically(tmp_path: Path):
    out = tmp_path / "deep" / "gpu.json"
    for seconds in (1.0, 2.0):
        write(out, {"cpu": "one"}, True, seconds, OUTCOMES)
    assert json.loads(out.read_text())["seconds"] == 2.0
    assert [file.name for file in out.parent.iterdir()] == ["gpu.json"]


def test_changes_of_the_plan_lose_no_request_and_no_token(tmp_path: Path) -> None:
    sizes = replace(TINY, changing=replace(TINY.changing, layers=(1,), rounds=1))
    model = shortened(next(model for model in sizes.models if model.name == "8b"), sizes.changing.num_layers)
    rows = list(transitions.rows(ensure_model(model, tmp_path), model, sizes))
    by_case = {case: [row for row in rows if row["case"] == case] for case in ("start", "change", "served", "tokens")}
    assert len(by_case["start"]) == 1
    assert {row["after"] for row in by_case["change"]} >= {"more pages", "fewer pages"}
    (served,) = by_case["served"]
    assert served["complete"]
    assert served["answers"] >= served["streams"]
    assert set(served["compiled"].values()) == {0}
    assert [row["equal"] for row in by_case["tokens"]] == [True, True, True]


def test_parts_that_overlap_measure_one_after_the_other(tmp_path: Path) -> None:
    """Each part says when it is ready and when it has its turn: none has one before the slow part is ready."""
    code = """
import json, sys, time
from bench.gpu_parts.turns import wait_for_turn
time.sleep(float(sys.argv[1]))
print(json.dumps({"row": {"case": "ready", "at": time.time()}}), flush=True)
wait_for_turn()
print(json.dumps({"row": {"case": "began", "at": time.time()}}), flush=True)
time.sleep(0.3)
print(json.dumps({"row": {"case": "ended", "at": time.time()}}), flush=True)
print(json.dumps({"end": "ok"}), flush=True)
"""

    class Waiting(Settings):
        def command(self, part: Part) -> list[str]:
            return [sys.executable, "-c", code, "1.5" if part.name == "slow" else "0"]

    outcomes: dict[str, Outcome] = {}
    settings = Waiting("cpu", True, tmp_path, sys.executable, sys.executable)
    run_in_turns([Part("slow", 60), Part("first", 60), Part("second", 60)], settings, outcomes, lambda name: None)
    assert {outcome.status for outcome in outcomes.values()} == {"ok"}, outcomes
    ready, *times = zip(*([row["at"] for row in outcome.rows] for outcome in outcomes.values()), strict=True)
    turns = sorted(zip(*times, strict=True))
    assert max(ready) <= turns[0][0], "while all the others wait"
    assert all(ended <= began for (_, ended), (began, _) in pairwise(turns)), "no two at once"


def test_parts_have_turns_at_half_of_the_time_though_another_is_not_ready(tmp_path: Path) -> None:
    class One(Settings):
        def command(self, part: Part) -> list[str]:
            return [sys.executable, "-c", READY if part.name == "ready" else "import time; time.sleep(600)"]

    outcomes: dict[str, Outcome] = {}
    settings = One("cpu", True, tmp_path, sys.executable, sys.executable)
    run_in_turns([Part("slow", 8), Part("ready", 8)], settings, outcomes, lambda name: None)
    assert {name: outcome.status for name, outcome in outcomes.items()} == {"slow": "not started", "ready": "ok"}


def test_parts_that_never_get_ready_are_named(tmp_path: Path) -> None:
    class Endless(Settings):
        def command(self, part: Part) -> list[str]:
            return [sys.executable, "-c", "import time; time.sleep(600)"]

    outcomes: dict[str, Outcome] = {}
    settings = Endless("cpu", True, tmp_path, sys.executable, sys.executable)
    run_in_turns([Part("one", 0.2), Part("two", 0.2)], settings, outcomes, lambda name: None)
    assert [(outcome.status, outcome.why) for outcome in outcomes.values()] == [
        ("not started", "no time was left, or it was not ready")
    ] * 2


def test_bursts_have_the_same_arrivals_in_every_run() -> None:
    first, again = arrivals(REAL.bursting), arrivals(REAL.bursting)
    assert (first == again).all()
    (calm, light), (overload, heavy), _ = REAL.bursting.phases
    within = (first[:, 0] >= calm) & (first[:, 0] < calm + overload)
    assert within.sum() / overload > 0.8 * heavy > light
    assert (np.diff(first[:, 0]) >= 0).all()


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: three engines are compiled")
def test_parts_for_single_questions_run_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu", "--platform", "cpu", "--tiny", "--overlap", "--out", str(out)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), "--parts", *PARTS_ASKED_FOR],
        cwd=ROOT, capture_output=True, text=True, timeout=460,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert {"samplers", *(f"products:{precision}" for precision in ("int4", "int8", "bf16"))} <= set(parts)
    kinds = {(row["precision"], row["tier"]) for row in parts["steps:8b"]["rows"] if row["case"].startswith("step,")}
    assert kinds == {(precision, tier) for precision in ("bfloat16", "int4") for tier in ("block", "fused")}
    assert parts["steps:8b"]["rows"][-1]["count"] == 0, "everything was compiled before the turn"
    assert [row["complete"] for row in parts["bursts:8b"]["rows"] if row["case"].startswith("burst")] == [True, True]
    assert all(row["total_steps_s"] > 0 for row in parts["threads:1b"]["rows"])
