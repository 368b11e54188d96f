"""Traces: every format, mistakes reported with their place, and scalings that are pure and recorded."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench.traces import scaling
from jaxserve.bench.traces.formats import load_trace
from jaxserve.bench.traces.prompts import trace_samples
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.core.errors import ConfigError
from tests.bench.trace_statistics import statistics

REAL = Path(__file__).parents[3] / "shared" / "traces"
real_traces = pytest.mark.skipif(not REAL.is_dir(), reason="the published traces are not here")

OURS = "arrival_s,input_tokens,output_tokens,service\n0.5,10,3,conv\n1.25,20,4,code\n"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
744286,ChatGPT,1623,338,1961,Conversation log
744287,ChatGPT,12,0,12,Conversation log
744290,GPT-4,337,126,463,API log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 512, "output_length": 26, "hash_ids": [46]}
"""
OUR_IDS = '{"arrival_s": 2.5, "input_tokens": 3, "output_tokens": 1, "hash_ids": [0]}\n'


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def loaded(tmp_path):
    def load(text: str | bytes, name: str = "some.trace") -> Trace:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_trace(path)

    return load


# -- formats


def test_our_csv_keeps_its_times_and_ignores_further_columns(loaded):
    trace = loaded(OURS, "busy_hour.csv")
    assert trace.name == "busy_hour"
    assert trace.arrival_s.tolist() == [0.5, 1.25]
    assert trace.input_tokens.tolist() == [10, 20]
    assert trace.output_tokens.tolist() == [3, 4]
    assert trace.hash_ids is None
    assert trace.history == ({"operation": "load", "format": "jaxserve", "file": "busy_hour.csv", "requests": 2},)


@pytest.mark.parametrize(
    "data", [gzip.compress(OURS.encode(), mtime=0), OURS.replace("\n", "\r\n"), "\ufeff" + OURS, "\n" + OURS + "\n\n"]
)
def test_compression_line_ends_and_blank_lines_do_not_matter(loaded, data):
    assert loaded(data).arrival_s.tolist() == [0.5, 1.25]


def test_azure_file_is_recognised(loaded):
    trace = loaded(AZURE)
    assert trace.arrival_s.tolist() == pytest.approx([0, 4.314579], abs=2e-6)
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.history[0]["format"] == "azure"


def test_azure_times_with_a_zone(loaded):
    text = AZURE.replace(".6805900", ".680590+00:00").replace(".9951690", ".995169+00:00")
    assert loaded(text).arrival_s.tolist() == pytest.approx([0, 4.314579], abs=2e-6)


def test_burstgpt_file_is_recognised_and_failures_are_dropped_and_counted(loaded):
    trace = loaded(BURSTGPT)
    assert trace.arrival_s.tolist() == [0, 4]
    assert trace.input_tokens.tolist() == [1623, 337]
    assert trace.history[0]["format"] == "burstgpt"
    assert trace.history[0]["failed_dropped"] == 1


def test_mooncake_file_is_recognised_with_its_blocks(loaded):
    trace = loaded(MOONCAKE)
    assert trace.arrival_s.tolist() == pytest.approx([0, 3.053])
    assert trace.output_tokens.tolist() == [52, 26]
    assert trace.hash_ids == ((46, 47), (46,))
    assert trace.block_tokens == 512


def test_our_json_lines_carry_blocks(loaded):
    trace = loaded(OUR_IDS)
    assert trace.arrival_s.tolist() == [2.5]
    assert trace.hash_ids == ((0,),)


def test_requests_are_put_in_order_of_arrival(loaded):
    trace = loaded(MOONCAKE.replace("27482", "99000"))
    assert trace.arrival_s.tolist() == pytest.approx([0, 68.465])
    assert trace.hash_ids == ((46,), (46, 47))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("arrival_s,input_tokens,output_tokens\n0,1,2\n1,x,2\n", r"line 3: input_tokens is 'x'"),
        ("arrival_s,input_tokens,output_tokens\n0,1,-2\n", r"line 2: output_tokens is '-2'"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", r"line 2: output_tokens is None"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,1\n", r"line 2: arrival_s is '-1'"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", r"line 2: arrival_s is 'nan'"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "noon"), r"line 3: TIMESTAMP is 'noon'"),
        (MOONCAKE.replace("[46]", '["a"]'), r"line 2: hash_ids is \['a'\]"),
        (MOONCAKE.replace(', "hash_ids": [46]', ""), r"line 2: hash_ids is None"),
        (MOONCAKE.replace("700", "7.5"), r"line 1: input_length is 7.5"),
        (MOONCAKE + "{oops\n", r"line 3 is not valid JSON"),
        (MOONCAKE + "[]\n", r"line 3 is not a JSON object"),
        ("a,b\n1,2\n", r"not a trace of a known format: its fields are a, b"),
        ("", r"has no requests"),
        ("arrival_s,input_tokens,output_tokens\n", r"has no requests"),
        (BURSTGPT.replace(",338,", ",0,").replace(",126,", ",0,"), r"all 3 requests failed"),
        (b"\x1f\x8bnot really gzip", r"cannot read the trace"),
        (gzip.compress(OURS.encode(), mtime=0)[:-12], r"cannot read the trace"),
        (b"\xff\xfe\x00", r"cannot read the trace"),
    ],
)
def test_mistake_in_a_trace_is_reported_with_its_place(loaded, text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        loaded(text)
    assert "some.trace" in str(caught.value)


def test_missing_trace_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the trace .*none\.csv"):
        load_trace(tmp_path / "none.csv")


# -- scaling


@pytest.fixture
def trace() -> Trace:
    """Return ten requests, one per second from 1 s on, with blocks of four tokens."""
    inputs = [3, 4, 5, 8, 9, 12, 4, 4, 16, 2]
    ids = tuple(tuple(range(-(-length // 4))) for length in inputs)
    return Trace.of("ten", range(1, 11), inputs, range(10, 20), hash_ids=ids, block_tokens=4)


SCALINGS = {
    "window": lambda t, g: scaling.window(t, 2, 5),
    "thin": lambda t, g: scaling.thin(t, 0.5, g),
    "stretch": lambda t, g: scaling.stretch(t, 2),
    "replicate": lambda t, g: scaling.replicate(t, 3, g),
    "fixed_lengths": lambda t, g: scaling.fixed_lengths(t, 8, 5),
    "clip_lengths": lambda t, g: scaling.clip_lengths(t, 8, 15),
    "scale_lengths": lambda t, g: scaling.scale_lengths(t, 0.5),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_leaves_its_trace_alone_and_records_itself(trace, name):
    before = trace.description()
    scaled = SCALINGS[name](trace, rng())
    assert trace.description() == before
    assert [entry["operation"] for entry in scaled.history] == [name]
    assert scaled.history[0]["requests"] == len(scaled)
    assert json.loads(json.dumps(scaled.description()))["history"] == list(scaled.history)
    assert scaled.name == "ten"
    assert not scaled.arrival_s.flags.writeable


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_depends_on_the_seed_alone(trace, name):
    first, again = (SCALINGS[name](trace, rng(7)) for _ in range(2))
    assert first.taken(range(len(first)))["arrival_s"].tolist() == again.arrival_s.tolist()
    assert first.input_tokens.tolist() == again.input_tokens.tolist()
    assert first.hash_ids == again.hash_ids


def test_history_holds_scalings_in_order(trace):
    scaled = scaling.stretch(scaling.window(trace, 1, 5), 0.5)
    assert [entry["operation"] for entry in scaled.history] == ["window", "stretch"]
    assert scaled.history[1]["factor"] == 0.5


def test_window_is_half_open_and_starts_at_zero(trace):
    cut = scaling.window(trace, 3, 4)
    assert cut.arrival_s.tolist() == [0, 1, 2, 3]
    assert cut.output_tokens.tolist() == [12, 13, 14, 15]
    assert cut.hash_ids == trace.hash_ids[2:6]


def test_window_keeps_idle_time_at_its_start(trace):
    assert scaling.window(trace, 0.5, 2).arrival_s.tolist() == [0.5, 1.5]


@pytest.mark.parametrize(("start", "length"), [(20, 5), (-1, 5), (1.5, 0.2), (2, 0), (2, -3)])
def test_empty_window_is_refused_with_what_the_trace_has(trace, start, length):
    with pytest.raises(ConfigError, match="has 10 in 10 s"):
        scaling.window(trace, start, length)


def test_thin_keeps_a_share_of_whole_requests(trace):
    thinned = scaling.thin(trace, 0.4, rng())
    assert len(thinned) == 4
    rows = {(t, i, o) for t, i, o in zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)}
    assert rows >= set(zip(thinned.arrival_s, thinned.input_tokens, thinned.output_tokens, strict=True))
    assert len(scaling.thin(trace, 0.001, rng())) == 1
    assert len(scaling.thin(trace, 1, rng())) == 10


def test_stretch_multiplies_times(trace):
    assert scaling.stretch(trace, 2.5).arrival_s.tolist() == [2.5 * time for time in range(1, 11)]


def test_replicate_multiplies_the_rate_and_keeps_the_original(trace):
    tripled = scaling.replicate(trace, 3, rng(), jitter_s=0.25)
    assert len(tripled) == 30
    assert set(trace.arrival_s) <= set(tripled.arrival_s)
    assert sorted(np.floor(tripled.arrival_s).tolist()) == sorted(trace.arrival_s.tolist() * 3)
    assert np.all(tripled.arrival_s % 1 < 0.25)
    assert sorted(tripled.input_tokens.tolist()) == sorted(trace.input_tokens.tolist() * 3)


def test_copies_share_prefixes_among_themselves_only(trace):
    doubled = scaling.replicate(trace, 2, rng())
    firsts = [ids[0] for ids in doubled.hash_ids]
    assert sorted(firsts) == [0] * 10 + [4] * 10
    assert {tuple(id - ids[0] for id in ids) for ids in doubled.hash_ids} == set(trace.hash_ids)


def test_fixed_lengths_cut_the_blocks_of_shorter_prompts(trace):
    fixed = scaling.fixed_lengths(trace, 8, None)
    assert fixed.input_tokens.tolist() == [8] * 10
    assert fixed.output_tokens.tolist() == trace.output_tokens.tolist()
    assert [len(ids) for ids in fixed.hash_ids] == [1, 1, 2, 2, 2, 2, 1, 1, 2, 1]


def test_clip_lengths_bounds_both(trace):
    clipped = scaling.clip_lengths(trace, 8, 15)
    assert clipped.input_tokens.tolist() == [3, 4, 5, 8, 8, 8, 4, 4, 8, 2]
    assert clipped.output_tokens.tolist() == [10, 11, 12, 13, 14, 15, 15, 15, 15, 15]
    assert scaling.clip_lengths(trace, None, None).input_tokens.tolist() == trace.input_tokens.tolist()


def test_scale_lengths_scales_blocks_too(trace):
    scaled = scaling.scale_lengths(trace, 0.5)
    assert scaled.block_tokens == 2
    assert scaled.input_tokens.tolist() == [2, 2, 2, 4, 4, 6, 2, 2, 8, 1]
    assert [len(ids) for ids in scaled.hash_ids] == [1, 1, 1, 2, 2, 3, 1, 1, 4, 1]


@pytest.mark.parametrize(
    ("scale", "option"),
    [
        (lambda t: scaling.thin(t, 0, rng()), "--thin"),
        (lambda t: scaling.thin(t, 1.5, rng()), "--thin"),
        (lambda t: scaling.stretch(t, 0), "--stretch"),
        (lambda t: scaling.stretch(t, float("nan")), "--stretch"),
        (lambda t: scaling.replicate(t, 0, rng()), "--replicate"),
        (lambda t: scaling.replicate(t, 2, rng(), jitter_s=-1), "--replicate"),
        (lambda t: scaling.fixed_lengths(t, 0), "--fixed-lengths"),
        (lambda t: scaling.clip_lengths(t, None, 0), "--clip-lengths"),
        (lambda t: scaling.scale_lengths(t, -1), "--scale-lengths"),
    ],
)
def test_scaling_out_of_its_limits_names_the_option(trace, scale, option):
    with pytest.raises(ConfigError, match=option):
        scale(trace)


# -- prompts


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load()


def test_samples_have_the_lengths_of_the_trace(trace, vocabulary):
    samples = trace_samples(trace, vocabulary, rng())
    assert [len(sample.prompt) for sample in samples] == trace.input_tokens.tolist()
    assert [sample.input_tokens for sample in samples] == trace.input_tokens.tolist()
    assert [sample.output_tokens for sample in samples] == trace.output_tokens.tolist()


def test_failed_requests_are_asked_for_one_token(vocabulary):
    (sample,) = trace_samples(Trace.of("failed", [0], [0], [0]), vocabulary, rng())
    assert (len(sample.prompt), sample.input_tokens, sample.output_tokens) == (1, 1, 1)


def blocks_trace() -> Trace:
    """Return a trace whose prompts share nothing, one block, and one and a half blocks."""
    return Trace.of(
        "blocks",
        range(4),
        [24, 24, 20, 12],
        [1] * 4,
        hash_ids=((9, 8, 7), (0, 1, 2), (0, 1, 2), (0, 1)),
        block_tokens=8,
    )


def shared(left, right) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_equal_hash_ids_give_equal_tokens(vocabulary):
    other, long, middle, short = (sample.prompt for sample in trace_samples(blocks_trace(), vocabulary, rng()))
    assert shared(long, middle) == 20
    assert shared(long, short) == 12
    assert shared(long, other) < 3
    assert [len(prompt) for prompt in (other, long, middle, short)] == [24, 24, 20, 12]


def test_blocks_depend_on_the_seed(vocabulary):
    first, again, another = (trace_samples(blocks_trace(), vocabulary, rng(seed)) for seed in (0, 0, 1))
    assert first == again
    assert shared(first[1].prompt, another[1].prompt) < 3


def test_prompt_longer_than_its_blocks_goes_on_with_tokens_of_its_own(vocabulary):
    trace = Trace.of("long", [0, 1], [20, 20], [1, 1], hash_ids=((3,), (3,)), block_tokens=8)
    first, second = (sample.prompt for sample in trace_samples(trace, vocabulary, rng()))
    assert 8 <= shared(first, second) < 11
    assert len(first) == len(second) == 20


def test_text_shares_prefixes_and_has_the_length_it_says(vocabulary):
    samples = trace_samples(blocks_trace(), vocabulary, rng(), as_text=True)
    tokens = [vocabulary.encode(sample.prompt) for sample in samples]
    assert [sample.input_tokens for sample in samples] == [24, 24, 20, 12] == [len(ids) for ids in tokens]
    assert shared(tokens[1], tokens[2]) >= 16
    assert shared(tokens[1], tokens[0]) < 3


def test_long_text_of_many_small_blocks_has_the_length_it_says(vocabulary):
    lengths = [400, 393, 385, 8, 7]
    ids = [tuple(range(-(-length // 8))) for length in lengths]
    trace = Trace.of("small", range(5), lengths, [1] * 5, hash_ids=tuple(ids), block_tokens=8)
    samples = trace_samples(trace, vocabulary, rng(), as_text=True)
    tokens = [vocabulary.encode(sample.prompt) for sample in samples]
    assert [sample.input_tokens for sample in samples] == [len(ids) for ids in tokens]
    assert [len(ids) for ids in tokens] == pytest.approx(lengths, abs=8)
    assert shared(tokens[0], tokens[1]) >= 380


# -- the published files


def published() -> dict[str, dict]:
    """Return published statistics by file name, of the files with arrivals."""
    facts = json.loads((REAL / "stats.json").read_text()) if REAL.is_dir() else {}
    return {name: fact for name, fact in facts.items() if "rate" in fact}


@real_traces
@pytest.mark.parametrize("name", published())
def test_published_traces_have_their_published_statistics(name):
    facts = published()[name]
    trace = load_trace(REAL / f"{name}.csv.gz")
    found = statistics(trace, facts["seconds"])
    assert len(trace) == facts["n"]
    for key in ("rate", "cv_interarrival", "peak_to_mean_10s", "in_mean", "in_p50", "in_p95", "out_mean", "out_p50"):
        assert found[key] == pytest.approx(facts[key], rel=0.03), key


@real_traces
def test_published_blocks_cover_every_prompt():
    trace = load_trace(REAL / "mooncake_synthetic_hashids.jsonl.gz")
    assert [len(ids) for ids in trace.hash_ids] == [-(-length // 512) for length in trace.input_tokens.tolist()]
    small = scaling.scale_lengths(scaling.window(trace, 0, 20), 1 / 64)
    assert small.block_tokens == 8
    assert sum(map(len, small.hash_ids)) > 100
