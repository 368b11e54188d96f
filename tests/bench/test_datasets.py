"""Datasets: lengths, shared prefixes, conversations, and the same samples for the same seed."""

import json
from collections import Counter

import numpy as np
import pytest

from jaxserve.bench.datasets.generated import prefix_samples, random_samples
from jaxserve.bench.datasets.lengths import Lengths
from jaxserve.bench.datasets.sharegpt import sharegpt_samples
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.core.errors import ConfigError


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# -- lengths


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("128", 128, 0),
        ("fixed:128", 128, 0),
        ("uniform:100,300", 200, 58),
        ("normal:500,50", 500, 50),
        ("lognormal:500,400", 500, 400),
    ],
)
def test_lengths_have_the_mean_and_deviation_in_their_text(text, mean, std):
    values = Lengths.parse(text).sample(rng(), 100_000)
    assert values.mean() == pytest.approx(mean, rel=0.02)
    assert values.std() == pytest.approx(std, rel=0.05)
    assert values.dtype == np.int64


def test_uniform_lengths_reach_both_ends():
    assert set(Lengths.parse("uniform:3,5").sample(rng(), 200).tolist()) == {3, 4, 5}


def test_lengths_are_at_least_one():
    assert Lengths.parse("normal:2,5").sample(rng(), 1000).min() == 1


def test_range_ratio_is_uniform_around_the_length():
    values = Lengths.around(10, 0.25).sample(rng(), 1000)
    assert (values.min(), values.max()) == (7, 13)  # floor and ceiling of 7.5 and 12.5
    assert set(Lengths.around(10).sample(rng(), 10).tolist()) == {10}


@pytest.mark.parametrize("text", ["128", "uniform:64,256", "normal:512,100", "lognormal:512,400.5"])
def test_lengths_are_written_as_they_are_read(text):
    lengths = Lengths.parse(text)
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-5",
        "1.5",
        "nan",
        "uniform:5",
        "uniform:9,3",
        "normal:5,-1",
        "gamma:1,2",
        "fixed:1,2",
        "normal:inf,1",
    ],
)
def test_text_that_is_not_a_length_is_refused_and_named(text):
    with pytest.raises(ConfigError, match="is not a length") as caught:
        Lengths.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("ratio", [-0.1, 1, 2, float("nan")])
def test_range_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(ConfigError, match="range ratio"):
        Lengths.around(10, ratio)


# -- random


def make_random(vocabulary, n=20, seed=0, **options):
    options = {"input_len": Lengths.parse("uniform:8,40"), "output_len": Lengths.parse("uniform:1,9")} | options
    return random_samples(vocabulary, n, rng(seed), **options)


@pytest.mark.parametrize("as_text", [False, True])
def test_random_samples_have_the_lengths_they_say(vocabulary, as_text):
    samples = make_random(vocabulary, as_text=as_text)
    assert len(samples) == 20
    for sample in samples:
        tokens = vocabulary.encode(sample.prompt) if as_text else sample.prompt
        assert len(tokens) == sample.input_tokens
        assert 8 <= sample.input_tokens <= 40
        assert 1 <= sample.output_tokens <= 9
    assert len({sample.prompt for sample in samples}) == 20


def test_random_samples_depend_on_the_seed_alone(vocabulary):
    assert make_random(vocabulary) == make_random(vocabulary) != make_random(vocabulary, seed=1)


def test_random_prefix_comes_on_top_and_begins_every_prompt(vocabulary):
    samples = make_random(vocabulary, prefix_len=16, input_len=Lengths.parse("8"))
    assert {len(sample.prompt) for sample in samples} == {24}
    assert len({sample.prompt[:16] for sample in samples}) == 1
    assert len({sample.prompt[:17] for sample in samples}) > 1


def test_random_prefix_as_text(vocabulary):
    samples = make_random(vocabulary, prefix_len=16, input_len=Lengths.parse("8"), as_text=True)
    assert {sample.input_tokens for sample in samples} == {24}
    head = vocabulary.encode(samples[0].prompt)[:15]  # the last one may grow together with what follows
    assert all(vocabulary.encode(sample.prompt)[:15] == head for sample in samples)


# -- prefix repetition


def make_prefix(vocabulary, n, **options):
    options = {"num_prefixes": 3, "prefix_len": 12, "suffix_len": 6, "output_len": 4} | options
    return prefix_samples(vocabulary, n, rng(), **options)


def test_prefixes_are_used_equally_often(vocabulary):
    samples = make_prefix(vocabulary, 30)
    assert Counter(Counter(sample.prompt[:12] for sample in samples).values()) == {10: 3}
    assert len({sample.prompt for sample in samples}) == 30
    assert {(len(sample.prompt), sample.input_tokens, sample.output_tokens) for sample in samples} == {(18, 18, 4)}


def test_prefixes_come_in_random_order(vocabulary):
    first = [sample.prompt[:12] for sample in make_prefix(vocabulary, 30)[:10]]
    assert len(set(first)) > 1


def test_prefix_samples_may_be_fewer_than_prefixes(vocabulary):
    assert len({sample.prompt[:12] for sample in make_prefix(vocabulary, 2)}) == 2


def test_prefix_samples_as_text_share_their_prefixes(vocabulary):
    samples = make_prefix(vocabulary, 9, as_text=True)
    heads = Counter(tuple(vocabulary.encode(sample.prompt)[:11]) for sample in samples)
    assert Counter(heads.values()) == {3: 3}
    assert all(len(vocabulary.encode(sample.prompt)) == sample.input_tokens == 18 for sample in samples)


@pytest.mark.parametrize("option", ["num_prefixes", "prefix_len", "suffix_len", "output_len"])
def test_prefix_samples_with_numbers_below_one_are_refused(vocabulary, option):
    with pytest.raises(ConfigError, match="must be at least 1"):
        make_prefix(vocabulary, 3, **{option: 0})


# -- conversations


def conversation(question: str, answer: str) -> dict:
    turns = [("system", "Be short."), ("human", question), ("gpt", answer), ("human", "why?"), ("gpt", "because")]
    return {"conversations": [{"from": who, "value": what} for who, what in turns]}


ASKED = [f"please write function number {i} of the module" for i in range(12)]
ANSWER = "def function(x): return x + 1"


def written(tmp_path, text: str):
    path = tmp_path / "dataset.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def dataset(tmp_path):
    return written(tmp_path, json.dumps([conversation(question, ANSWER) for question in ASKED]))


def test_conversation_gives_the_first_question_and_the_length_of_its_answer(vocabulary, dataset):
    samples = sharegpt_samples(vocabulary, 12, rng(), path=dataset)
    assert sorted(sample.prompt for sample in samples) == sorted(ASKED)
    for sample in samples:
        assert sample.input_tokens == len(vocabulary.encode(sample.prompt))
        assert sample.output_tokens == len(vocabulary.encode(ANSWER, special=False))


def test_conversations_are_a_random_choice(vocabulary, dataset):
    def prompts(seed):
        return [sample.prompt for sample in sharegpt_samples(vocabulary, 4, rng(seed), path=dataset)]

    assert prompts(0) == prompts(0) != prompts(1)
    assert len(set(prompts(0))) == 4


def test_conversations_as_token_ids_have_their_lengths(vocabulary, dataset):
    (sample,) = sharegpt_samples(vocabulary, 1, rng(), path=dataset, as_text=False)
    assert sample.prompt == tuple(vocabulary.encode(vocabulary.text(sample.prompt)))


def test_too_few_conversations_are_repeated(vocabulary, dataset):
    samples = sharegpt_samples(vocabulary, 30, rng(), path=dataset)
    assert len(samples) == 30
    assert {sample.prompt for sample in samples} == set(ASKED)


def test_prompt_and_completion_in_json_lines_are_read(vocabulary, tmp_path):
    entry = {"prompt": "one long line\u2028of a question", "completion": ANSWER}
    path = written(tmp_path, "\n".join(["", json.dumps(entry, ensure_ascii=False), ""]))
    (sample,) = sharegpt_samples(vocabulary, 1, rng(), path=path)
    assert sample.prompt == entry["prompt"]


def test_output_length_replaces_that_of_the_answers(vocabulary, tmp_path):
    path = written(tmp_path, json.dumps([conversation(ASKED[0], "")]))
    (sample,) = sharegpt_samples(vocabulary, 1, rng(), path=path, output_len=77)
    assert sample.output_tokens == 77


def test_conversations_beyond_the_limits_are_left_out(vocabulary, tmp_path):
    entries = [conversation("x", ANSWER), conversation(ASKED[0] * 50, ANSWER), conversation(ASKED[1], ANSWER)]
    path = written(tmp_path, json.dumps(entries))
    samples = sharegpt_samples(vocabulary, 5, rng(), path=path, max_input_tokens=100)
    assert {sample.prompt for sample in samples} == {ASKED[1]}
    with pytest.raises(ConfigError, match="none of its 3 conversations"):
        sharegpt_samples(vocabulary, 5, rng(), path=path, max_total_tokens=5)


def test_conversations_without_an_answer_are_skipped(vocabulary, tmp_path):
    unanswered = {"conversations": [{"from": "human", "value": "is anybody there, or am I alone?"}]}
    path = written(tmp_path, json.dumps([unanswered, conversation(ASKED[0], ANSWER)]))
    assert [sample.prompt for sample in sharegpt_samples(vocabulary, 1, rng(), path=path)] == [ASKED[0]]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"conversations": [], "x": 1}, {"text": "?"}]', "entry 1"),
        ('[{"conversations": 5}]', "entry 0"),
        ('[{"conversations": [{"from": "human"}, {"from": "gpt"}]}]', "entry 0"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": 3, "completion": "b"}', "line 2"),
        ('{"prompt": "a", "completion": "b"}\n{oops', "line 2 is not valid JSON"),
        ("[1, 2", "not valid JSON"),
        ('"text"', "line 1"),
    ],
)
def test_mistake_in_a_dataset_is_reported_with_its_place(vocabulary, tmp_path, text, place):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=place) as caught:
        sharegpt_samples(vocabulary, 1, rng(), path=path)
    assert str(path) in str(caught.value)


def test_missing_dataset_is_named(vocabulary, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        sharegpt_samples(vocabulary, 1, rng(), path=tmp_path / "none.json")
