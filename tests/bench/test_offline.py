"""Offline measurements: arithmetic on made-up steps, and every measurement on a tiny model. Speed is not tested."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve import EngineConfig
from jaxserve.bench.offline.engine import OfflineEngine, RunFigures, jobs
from jaxserve.bench.offline.latency import cases, latency, row as latency_row
from jaxserve.bench.offline.options import LatencyOptions, StartupOptions, ThroughputOptions
from jaxserve.bench.offline.startup import medians, server, startup
from jaxserve.bench.offline.steps import StepTimes, decode_steps, periods, sample_quantile
from jaxserve.bench.offline.throughput import row as throughput_row, throughput
from jaxserve.bench.result import load
from jaxserve.bench.workload import Sample
from jaxserve.cli.main import app
from jaxserve.core.errors import ConfigError
from jaxserve.engine.client import TokensPrompt

ROOT = Path(__file__).resolve().parents[2]


def config(model: Path, **more: object) -> EngineConfig:
    return EngineConfig(model=model, load_format="dummy", **{"max_num_batched_tokens": 36, "max_num_seqs": 4, **more})


def step(number: int, done_s: float, *, decodes: int = 4, prefill: int = 0) -> StepTimes:
    return StepTimes(number, decodes, prefill, 0.001, 0.002, 0.003, done_s)


STEPS = (
    step(0, 1.0, decodes=0, prefill=64),
    step(1, 1.5, decodes=2, prefill=32),
    step(2, 2.0),
    step(3, 2.1),
    step(4, 2.3),
    step(5, 2.4, decodes=3),
    step(6, 2.5),
)


def test_only_consecutive_full_decode_steps_count_as_steps_of_a_batch():
    assert [s.step for s in decode_steps(STEPS, 4)] == [2, 3, 4, 6]
    assert periods(STEPS, 4) == pytest.approx([0.1, 0.2])
    assert len(periods(STEPS)) == 6


def test_quantiles_are_interpolated():
    assert sample_quantile([], 0.5) is None
    assert sample_quantile([3.0], 0.9) == 3.0
    assert sample_quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert sample_quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)


def test_a_latency_row_is_arithmetic_on_the_steps():
    prefill = RunFigures(0.5, 4, 64, 4, (STEPS[:1],), compilations=0, preemptions=0)
    whole = RunFigures(3.0, 4, 64, 32, (STEPS,), compilations=2, preemptions=0)
    row = latency_row(4, 16, 8, [prefill], [whole])
    assert row["prefill_tok_s"] == 4 * 16 / 0.5
    assert row["step_ms"] == pytest.approx(150)
    assert row["decode_tok_s"] == pytest.approx(4 / 0.15, abs=0.1)
    assert row["host_ms"] == pytest.approx(6)
    assert row["latency_ms"] == 3000
    assert row["compilations"] == 2


def test_a_throughput_row_is_arithmetic_on_the_run():
    row = throughput_row(RunFigures(2.0, 3, 300, 60, (STEPS,), compilations=0, preemptions=1), 4)
    assert (row["requests_per_s"], row["output_tok_s"], row["total_tok_s"]) == (1.5, 30, 180)
    assert (row["completed"], row["num_prompts"], row["preemptions"]) == (3, 4, 1)
    assert row["mean_decodes"] == pytest.approx((2 + 4 * 4 + 3) / 6, abs=0.1)


def test_latency_has_a_row_for_every_case_and_compiles_nothing(tiny_model: Path):
    options = LatencyOptions(config(tiny_model), batches=(1, 4), input_lens=(16,), output_len=12, repeats=2)
    runs = []
    rows = list(latency(options, lambda: runs.append(1)))
    assert [(row["batch"], row["input_len"]) for row in rows] == cases(options)
    assert all(row["compilations"] == 0 for row in rows)
    assert all(row["step_ms"] > 0 and row["prefill_tok_s"] > 0 and row["host_ms"] > 0 for row in rows)
    assert len(runs) == len(rows) * (1 + 2 * options.repeats)
    json.dumps(rows, allow_nan=False)


def test_a_batch_that_is_never_decoded_as_a_whole_has_no_decode_figures(tiny_model: Path):
    options = LatencyOptions(config(tiny_model), batches=(4,), input_lens=(96,), output_len=2, repeats=1)
    (row,) = latency(options)
    assert row["step_ms"] is None
    assert row["decode_tok_s"] is None
    assert row["latency_ms"] > 0


def test_a_batch_larger_than_the_engine_runs_is_refused(tiny_model: Path):
    with pytest.raises(ConfigError, match="max_num_seqs is 4"):
        next(latency(LatencyOptions(config(tiny_model), batches=(8,))))
    with pytest.raises(ConfigError, match="dp is 2"):
        next(latency(LatencyOptions(config(tiny_model, dp=2))))


def test_compilations_during_a_run_are_counted(tiny_model: Path):
    with OfflineEngine(config(tiny_model, warmup=False)) as engine:
        cold = engine.run(jobs([TokensPrompt((3, 4, 5))], 3))
        warm = engine.run(jobs([TokensPrompt((6, 7, 8))], 3))
    assert cold.compilations > 0
    assert warm.compilations == 0
    assert [s.prefill_tokens for s in warm.steps[0]] == [3, 0, 0]


def test_throughput_of_random_prompts_and_of_samples(tiny_model: Path):
    options = ThroughputOptions(config(tiny_model), num_prompts=6, input_len=20, output_len=5)
    (row,) = throughput(options)
    assert (row["completed"], row["input_tokens"], row["output_tokens"]) == (6, 120, 30)
    assert row["compilations"] == 0
    samples = [Sample(tuple(range(3, 3 + n)), n, n) for n in (4, 9)]
    finished = []
    (row,) = throughput(options, samples, lambda: finished.append(1))
    assert (row["completed"], row["input_tokens"], row["output_tokens"]) == (2, 13, 13)
    assert len(finished) == 2
    assert row["interrupted"] is False


def test_throughput_command_measures_the_engine_in_its_options(tmp_path: Path):
    file = tmp_path / "result.json"
    engine = ["--precision", "int8", "--kv-cache-dtype", "int8"]
    steps = ["--kv-pages", 9, "--max-num-seqs", 3, "--max-num-batched-tokens", 35, "--max-model-len", 64]
    asked = ["--num-prompts", 4, "--input-len", 20, "--output-len", 30, "--save-result", file]
    done = CliRunner().invoke(app, ["bench", "throughput", *map(str, (*engine, *steps, *asked))])
    assert done.exit_code == 0, done.output
    (row,) = load(file)["rows"]
    assert (row["completed"], row["output_tokens"]) == (4, 120)
    assert row["mean_decodes"] <= 2.0  # eight pages are two requests of 50 tokens


def test_throughput_counts_every_instance(tiny_model: Path):
    (row,) = throughput(ThroughputOptions(config(tiny_model, dp=2), num_prompts=5, input_len=8, output_len=4))
    assert row["output_tokens"] == 20


def test_an_interrupted_throughput_keeps_what_was_measured(tiny_model: Path):
    main = threading.get_ident()

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)

    options = ThroughputOptions(config(tiny_model), num_prompts=9, input_len=8, output_len=4)
    (row,) = throughput(options, on_finished=interrupt)
    assert row["interrupted"] is True
    assert 1 <= row["completed"] < 9


def test_startup_has_phases_for_empty_and_warm_cache(tiny_model: Path):
    options = StartupOptions(config(tiny_model, max_num_seqs=1, max_num_batched_tokens=33), server=False)
    empty, warm = startup(options)
    assert (empty["cache"], warm["cache"]) == ("empty", "warm")
    assert empty["executables"] == warm["executables"] > 0
    phases = [name for name in empty if name.endswith("_s") and name not in ("ready_s", "first_token_s")]
    assert phases == ["interpreter_s", "import_s", "resolve_s", "load_s", "compile_s"]
    for row in (empty, warm):
        assert row["ready_s"] == pytest.approx(sum(row[name] for name in phases), abs=0.05)
        assert row["first_token_s"] >= row["ready_s"]


def test_a_server_is_timed_until_its_first_token(tiny_model: Path, tmp_path: Path):
    found = server(config(tiny_model, max_num_seqs=1, max_num_batched_tokens=33, compile_cache=tmp_path), 120)
    assert found["first_token_s"] >= found["ready_s"] > 0
    assert list(tmp_path.iterdir()), "the server used the cache that it was given"


def test_median_of_missing_figures_is_none():
    assert medians([{"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0}, {"a": 2.0, "b": 2.0}]) == {"a": 2.0, "b": None}


def test_failed_start_raises_with_its_reason(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        next(startup(StartupOptions(config(tmp_path), server=False)))


def test_options_import_no_jax_and_measurements_no_web_framework():
    code = (
        "import sys, jaxserve.bench.offline.options; assert 'jax' not in sys.modules\n"
        "import jaxserve.bench.offline.latency, jaxserve.bench.offline.throughput\n"
        "import jaxserve.bench.offline.startup, jaxserve.bench.offline.phases\n"
        "found = {'fastapi', 'uvicorn', 'pydantic', 'starlette'} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
