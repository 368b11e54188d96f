"""The adaptation measurement: figures read from results."""

import numpy as np
import pytest

from bench.morph_parts.measure import Watch
from bench.morph_parts.quality import adaptation_figures, in_order, measures, profile_of
from bench.morph_parts.systems import INT8
from bench.morph_parts.timeline import (
    Timeline,
    Tokens,
    saturated_throughput,
    step_ratios,
    tokens_by_swapped,
    transitions,
)
from jaxserve.bench.prometheus import Scrape
from jaxserve.core.bundled import bundled_model_path
from tests.bench.morph_results import INT4_LAYERS, decision, in_int8, made_result, swap


def test_token_times_are_when_the_client_had_them():
    tokens = Tokens.of(made_result())
    assert tokens.time_s.tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8, 2.5, 2.6, 2.7, 2.8])
    assert np.isnan(tokens.gap_s[[0, 4]]).all()
    assert tokens.weight.tolist() == [1] * 8


def test_tokens_of_one_chunk_share_its_time():
    tokens = Tokens.of(made_result(itls=[[0.1], []], output_lens=[4, 3]))
    assert tokens.weight.tolist() == [2, 2, 3]


def test_token_near_a_swap_counts_for_more_swapped_layers():
    timeline = Timeline.of(made_result())
    assert timeline.swapped_at(np.array([0.5, 1.5, 2.5, 3.2, 9.0])).tolist() == [0, 2, 2, 2, 0]
    assert tokens_by_swapped(made_result()) == {0: 4, 2: 4}


def test_swaps_are_found_and_counted():
    result = made_result()
    assert list(Timeline.of(result).swap_spans()) == [(1.0, 2.0), (3.0, 3.5)]
    assert transitions(result) == {"done": 4}


def test_gaps_during_swaps_are_compared_with_those_before():
    gaps = [0.02] * 50 + [0.03] * 30  # from second 0 on: the swap is between 1 and 2
    result = made_result(start_times=[0.0], ttfts=[0.0], itls=[gaps], output_lens=[81], errors=[""])
    assert step_ratios(result) == [pytest.approx(1.5)]


def test_step_ratio_of_too_few_gaps_is_missing():
    assert step_ratios(made_result()) == []


def test_step_ratio_of_tokens_that_arrive_together_is_missing():
    gaps = [0.0, 0.0, 0.06] * 16 + [0.03] * 30
    result = made_result(start_times=[0.0], ttfts=[0.0], itls=[gaps], output_lens=[79], errors=[""])
    assert step_ratios(result) == []


def test_saturated_throughput_leaves_out_start_and_end():
    result = made_result(start_times=[0.0], ttfts=[5.0], itls=[[0.1] * 89 + [3.0] * 10], output_lens=[100], errors=[""])
    assert saturated_throughput(result) == pytest.approx(10, rel=0.05)


def test_cross_entropy_is_weighted_by_tokens():
    profile = profile_of(bundled_model_path())
    figures = adaptation_figures(made_result(), profile)
    losses = profile.curves["int4"]["lis"][0].cross_entropy
    assert figures["cross_entropy"] == pytest.approx((losses[0] + losses[2]) / 2)
    assert figures["cross_entropy_full"] == losses[0]
    assert figures["adaptation"]["peak_kv_pages"] == 20
    assert figures["adaptation"]["most_swapped_layers"] == 2


def test_cross_entropy_of_int8_layers_comes_from_the_int8_curve():
    profile = profile_of(bundled_model_path())
    figures = adaptation_figures(in_int8(made_result(system=INT8)), profile)
    losses = profile.curves["int8"]["lis"][0].cross_entropy
    assert figures["cross_entropy"] == pytest.approx((losses[0] + losses[2]) / 2)


def test_losses_of_two_precisions_add_up():
    profile = profile_of(bundled_model_path())
    int4, int8 = (profile.curves[precision]["lis"][0].top1 for precision in ("int4", "int8"))
    found = measures(profile, ["int4"] * 2 + ["int8"] * 6, "top1")
    assert found[:3] == pytest.approx(int4[:3])
    assert found[8] == pytest.approx(int4[2] + int8[8] - int8[2])


def test_a_model_without_a_profile_has_no_cross_entropy(tmp_path):
    assert profile_of(tmp_path) is None
    assert adaptation_figures(made_result(), None)["cross_entropy"] is None


def test_swaps_in_profile_order_are_recognised():
    swaps = dict(zip((3, 1, 0, 2), ("int4", "int4", "int8", "int8"), strict=True))
    entry = decision(swap(1, "int4"), swap(3, "int4"), "instance 0: KV 54 -> 80 pages (needs 1.7 MB)")
    assert in_order([entry, decision(swap(1, "bfloat16"))], swaps)
    assert in_order([entry, decision(swap(0, "int8")), decision(swap(0, "bfloat16"))], swaps)
    assert not in_order([entry, decision(swap(0, "int4"))], swaps)
    assert not in_order([entry, decision(swap(3, "bfloat16"))], swaps)
    assert not in_order([decision(swap(3, "int4"), outcome="failed: layers.3")], swaps)


def test_bits_are_the_mean_over_all_layers():
    assert Timeline.of(made_result()).bits.tolist() == [16, 16, 13, 13, 16]
    assert Timeline.of(in_int8(made_result())).bits.tolist() == [16, 16, 14, 14, 16]


def test_watch_is_settled_only_while_the_state_is_as_at_the_start():
    watch = Watch()
    for time_s, layers, pages in ((0, 0, 10), (1, 2, 10), (2, 2, 20), (3, 0, 20), (4, 0, 10), (5, 0, 10)):
        watch.look(time_s, Scrape({INT4_LAYERS: layers, "kv_pages_total": pages, "plan_version": time_s}, {}))
        assert watch.settled_since == {0: 0, 4: 4, 5: 4}.get(time_s)
