"""Calibration: its load, the time outside the engine, and the hardware file."""

import asyncio
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxserve.bench.offline import calibrate as calibration
from jaxserve.bench.offline.calibrate import print_calibration, save, seconds_outside
from jaxserve.bench.offline.calibration_load import CalibrationLoad, Limits, batches, prompt_lengths
from jaxserve.bench.offline.options import CalibrationOptions, changed_fields
from jaxserve.bench.record import RequestRecord
from jaxserve.cli.main import app
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.engine.step_log import AnswerRecord, Arrival, Recording, Step
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.sim.cost_model_fit import Fit
from jaxserve.sim.hardware import Curve, hardware_of_gpus, load_hardware
from tests.bench.fake_client import FakeClient

CPU = Limits(max_num_seqs=32, max_model_len=2048, prefill_tokens=512, kv_tokens=40_000, vocab_size=4096)
GPU = Limits(max_num_seqs=256, max_model_len=8192, prefill_tokens=2048, kv_tokens=10**6, vocab_size=128_256)
TIGHT = Limits(max_num_seqs=5, max_model_len=96, prefill_tokens=64, kv_tokens=600, vocab_size=100)


@pytest.mark.parametrize("limits", [CPU, GPU, TIGHT])
def test_calibration_prompts_and_batches_fit_the_server_limits(limits):
    lengths = prompt_lengths(limits)
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] <= 32
    assert lengths[-1] + 8 <= limits.max_model_len
    for clients, prompt in batches(limits):
        assert 1 <= clients <= limits.max_num_seqs
        assert 1 <= prompt < limits.max_model_len
        assert clients * prompt <= limits.kv_tokens


def test_calibration_batches_have_every_step_size_and_one_between():
    sizes = {clients for clients, _ in batches(CPU)}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    assert {clients for clients, _ in batches(replace(CPU, max_num_seqs=5))} == {1, 2, 3, 4, 5}
    deep = {clients: prompt for clients, prompt in batches(CPU) if prompt > 16}
    assert all(clients * prompt > 4000 for clients, prompt in deep.items() if clients > 2)


def test_longest_calibration_prompt_takes_several_steps_if_possible():
    assert prompt_lengths(CPU)[-1] == 2 * CPU.prefill_tokens
    assert prompt_lengths(TIGHT)[-1] == 88


def test_calibration_load_covers_lone_requests_all_batch_sizes_and_open_load():
    client, phases = FakeClient(0.001), []
    records = asyncio.run(CalibrationLoad(client, TIGHT, seconds=1.0).run(phases.append))
    assert phases == ["lone requests", "batches", "prompts and decodes mixed", "requests at random times"]
    assert set(client.times_in_flight) >= {1, 2, 3, 4, 5}
    assert {record.input_tokens for record in records.lone} == set(prompt_lengths(TIGHT))
    assert records.open
    for sample in client.samples:
        assert sample.input_tokens + sample.output_tokens <= TIGHT.max_model_len
        assert len(sample.prompt) == sample.input_tokens
        assert all(0 < token < TIGHT.vocab_size for token in sample.prompt)


def test_calibration_load_without_time_runs_every_case_once():
    client = FakeClient(0.001)
    records = asyncio.run(CalibrationLoad(client, TIGHT, seconds=1e-6).run())
    assert len(records.lone) == len(prompt_lengths(TIGHT))
    assert len(records.open) == 2
    assert max(client.times_in_flight) == 5


def test_calibration_load_with_an_unanswered_request_raises():
    with pytest.raises(ConfigError, match="for 8 tokens after 16 was not answered: HTTP 503"):
        asyncio.run(CalibrationLoad(FakeClient(0.001, error="HTTP 503"), TIGHT, seconds=1.0).run())


def record(sent: float, first: float, prompt: int) -> RequestRecord:
    return RequestRecord(0, sent, sent, prompt, sent_s=sent, chunk_times_s=[first, first + 1])


def test_time_outside_the_engine_is_before_the_step_and_after_its_token():
    step = Step(0, 7, 10.004, 10.005, 10.100, 32, 1, 5, 0, 40, 1, 30, 1)
    arrivals = (Arrival("a", 0, 7, 10.003, 30, 8, 1, 0), Arrival("b", 0, 7, 10.003, 31, 8, 1, 0))
    answers = {name: AnswerRecord(name, 0, 10.100, 11.0, 8, 0, 0, "length") for name in "ab"}
    recording = Recording({}, steps=(step,), arrivals=arrivals, answers=answers)
    sent = [record(10.0, 10.102, 30), record(20.0, 20.1, 30)]  # of the other one nothing is in the log
    ((tokens, streams, seconds),) = seconds_outside(sent, recording, idle=True)
    assert (tokens, streams, seconds) == (30, 5, pytest.approx(0.102 - 0.096))
    ((_, _, seconds),) = seconds_outside(sent, recording, idle=False)
    assert seconds == pytest.approx(0.102 - 0.097)


def test_requests_of_equal_length_are_matched_by_time():
    steps = tuple(Step(0, n, n + 0.1, n + 0.1, n + 0.5, 32, 1, 0, 0, 40, 1, 30, 1) for n in (1, 2))
    arrivals = tuple(Arrival(f"r{n}", 0, n, n + 0.05, 30, 8, 1, 0) for n in (1, 2))
    answers = {f"r{n}": AnswerRecord(f"r{n}", 0, n + 0.5, n + 0.9, 8, 0, 0, "length") for n in (1, 2)}
    found = seconds_outside(
        [record(2.0, 2.6, 30), record(1.0, 1.6, 30)],
        Recording({}, steps=steps, arrivals=arrivals, answers=answers),
        idle=True,
    )
    assert [seconds for _, _, seconds in found] == pytest.approx([0.2, 0.2])


def test_known_gpu_maps_to_its_hardware_file():
    assert hardware_of_gpus("NVIDIA H200, 143771 MiB, driver 570") == "h200"
    assert hardware_of_gpus("NVIDIA A100 80GB PCIe, 81920 MiB, driver 550") == "a100-80"
    assert hardware_of_gpus("8 x NVIDIA A100-SXM4-40GB, 40960 MiB, driver 550") == "a100-40"
    assert hardware_of_gpus("NVIDIA L4, 23034 MiB, driver 570") == "l4"
    for other in ("NVIDIA GeForce RTX 3060, 12288 MiB, driver 570", "NVIDIA L40S, 46068 MiB, driver 570"):
        with pytest.raises(ConfigError, match=r"unknown GPU .*: configs/hardware has a100-40"):
            hardware_of_gpus(other)


def found() -> Fit:
    hardware = replace(
        load_hardware("l4"),
        name="here",
        measured=True,
        rates={"bfloat16": 1e12},
        efficiency={"bfloat16": Curve(((1, 0.5), (64, 0.25))), "attention": Curve(((1, 0.125),))},
    )
    seen = {("bfloat16", 1): 7, ("bfloat16", 64): 9, ("attention", 0): 16}
    return Fit(hardware, 20, 4, 0.05, 0.125, 0.99, seen, ChunkCost(1e-9, 2e-5, 3e-3), 0.08)


def test_a_calibration_is_saved_as_a_hardware_file(tmp_path):
    save(found(), tmp_path / "here.yaml")
    assert load_hardware(tmp_path / "here.yaml") == found().hardware


def test_printed_calibration_shows_curves_and_errors():
    console = Console(width=200)
    with console.capture() as shown:
        print_calibration(found(), console)
    text = shown.get()
    assert "bfloat16" in text
    assert "0.250      9" in text
    assert "5.0% (median), 12.5% (90th percentile), -1.0% in total" in text
    assert "b 2e-05, g 0.003 s; mean error 8.0%" in text
    assert "stream" in text


def test_changed_fields_leave_out_defaults():
    config = EngineConfig(model="m", max_num_seqs=8, step_log="log")
    assert changed_fields(config) == {"model": "m", "max_num_seqs": 8, "step_log": "log"}
    assert json.dumps(changed_fields(config))


def test_calibration_of_several_devices_is_refused():
    options = CalibrationOptions("here", EngineConfig(tp=2))
    with pytest.raises(ConfigError, match="measures one device: tp is 2"):
        calibration.calibrate(options)


@pytest.mark.parametrize(
    "given", [{"precision": "int4"}, {"layer_precision": "0:int8"}, {"head_precision": "int8"}], ids=str
)
def test_calibration_takes_precisions_from_one_option_alone(given: dict[str, str]):
    with pytest.raises(ConfigError, match="from --precisions alone"):
        calibration.calibrate(CalibrationOptions("here", EngineConfig(**given)))


def test_calibration_of_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="precisions is 'int5'"):
        calibration.calibrate(CalibrationOptions("here", precisions=("int5",)))


def test_calibrate_to_a_file_that_is_not_yaml_is_refused():
    done = CliRunner().invoke(app, ["bench", "latency", "--calibrate", "here.json"])
    assert done.exit_code == 1
