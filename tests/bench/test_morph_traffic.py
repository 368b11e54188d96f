"""The adaptation measurement: its traffic, and systems within one memory budget."""

import numpy as np
import pytest

from bench.morph_parts.systems import (
    ACCURACY,
    ADAPTING,
    FULL,
    INT4,
    INT8,
    PERFORMANCE,
    Setup,
    envelope,
    swap_precisions,
    systems,
)
from bench.morph_parts.traffic import Prompts, RequestLengths, at_once, peak_demand, with_lengths, with_peak, workload
from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.bench.traces.trace import Trace
from jaxserve.core.bundled import bundled_model_path

LENGTHS = RequestLengths(prompt=96, answer=160, max_prompt_tokens=160, max_answer_tokens=280)


def burst() -> Trace:
    return synthetic("azure-burst", 72, None, np.random.default_rng(0))


def test_lengths_have_the_wanted_means_and_limits():
    trace = with_lengths(burst(), LENGTHS)
    assert trace.input_tokens.mean() == pytest.approx(96, abs=1)
    assert trace.output_tokens.mean() == pytest.approx(160, abs=1)
    assert (trace.input_tokens.max(), trace.output_tokens.max()) == (160, 280)
    assert trace.history[-1]["factor_output"] > 0


def test_with_lengths_leaves_out_failed_requests():
    trace = with_lengths(Trace.of("t", [0, 1, 2], [10, 20, 30], [5, 0, 7]), LENGTHS)
    assert trace.arrival_s.tolist() == [0, 2]
    assert trace.history[-1]["failed_left_out"] == 1


@pytest.mark.parametrize("tokens_per_s", [500, 6000])
def test_with_peak_reaches_the_demand_and_keeps_times(tokens_per_s):
    trace = with_lengths(burst(), LENGTHS)
    scaled = with_peak(trace, tokens_per_s, np.random.default_rng(1))
    assert peak_demand(scaled) == pytest.approx(tokens_per_s, rel=0.1)
    assert scaled.history[-1]["tokens_per_s"] == peak_demand(scaled)
    assert scaled.duration_s == pytest.approx(trace.duration_s, abs=3)


def test_the_peak_of_a_short_trace_counts_all_of_it():
    assert peak_demand(Trace.of("t", [0.5, 2.5], [1, 1], [40, 60])) == 10


def test_a_workload_has_the_traces_lengths_and_pieces_of_the_text():
    trace = at_once(with_lengths(burst(), LENGTHS), 5, np.random.default_rng(0))
    made = workload(trace, Prompts(range(1000), "numbers"), np.random.default_rng(0))
    assert len(made.requests) == 5
    for request, length in zip(made.requests, trace.input_tokens, strict=True):
        first = request.sample.prompt[0]
        assert request.sample.prompt == tuple(range(first, first + length))
        assert request.arrival_s == 0
    assert made.description["prompts"] == "numbers"


def test_every_system_fills_the_budget():
    setup = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=8)
    rooms = {name: envelope(setup, name) for name in (FULL, INT4, *ADAPTING)}
    known = systems(setup, rooms[FULL])
    budget = rooms[FULL].full_layers_bytes + 56 * rooms[FULL].page_bytes
    for name, room in rooms.items():
        layers = {FULL: room.full_layers_bytes, INT4: room.quantized_layers_bytes}.get(
            name, room.full_layers_bytes + room.swap_buffer_bytes
        )
        left = budget - layers - known[name].kv_pages * room.page_bytes
        assert 0 <= left < room.page_bytes, name


def test_max_pages_are_those_of_a_static_engine_in_the_lowest_precision():
    setup = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=8)
    known = systems(setup, envelope(setup))
    most = {
        name: int(system.serve_args[system.serve_args.index("--max-kv-pages") + 1]) for name, system in known.items()
    }
    for name, pages in most.items():
        room = envelope(setup, name)
        assert pages == 56 + (room.full_layers_bytes - room.quantized_layers_bytes) // room.page_bytes
    assert most[FULL] == most[INT4] == most[PERFORMANCE] == known[INT4].kv_pages
    assert most[INT8] < most[ACCURACY] < most[PERFORMANCE]
    assert known[ACCURACY].kv_pages <= 56


def test_a_system_swaps_to_the_precisions_of_its_policy():
    assert swap_precisions(INT4, 4) == swap_precisions(PERFORMANCE, 4) == ("int4",) * 4
    assert swap_precisions(INT8, 4) == ("int8",) * 4
    assert swap_precisions(ACCURACY, 8) == ("int4",) * 2 + ("int8",) * 6
