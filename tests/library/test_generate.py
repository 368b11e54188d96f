"""LLM against the model's definition: the paged, batched, chunked engine gives what a plain forward pass gives."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, EngineStopped, JaxserveError, PromptTooLong, RequestError, SamplingParams
from jaxserve.core.errors import NoTokenizer
from tests.support.internals import core_of, engine_of
from tests.support.reference import Reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)  # around the edges of pages and tiles


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=8) as llm:
        yield llm


def test_greedy_tokens_equal_those_of_a_plain_forward_pass(llm: LLM, reference: Reference) -> None:
    prompts = [prompt(i, length) for i, length in enumerate(LENGTHS)]
    assert tokens(llm, prompts) == [reference.greedy(p, 12) for p in prompts]


def test_logprobs_equal_those_of_a_plain_forward_pass(llm: LLM, reference: Reference) -> None:
    p = prompt(20, 70)
    (output,) = llm.generate([p], SamplingParams(temperature=0, max_tokens=3, logprobs=5, prompt_logprobs=2))
    generated = list(output.outputs[0].token_ids)
    expected = reference.logprobs(p + generated)
    assert output.outputs[0].logprobs is not None
    for i, entry in enumerate(output.outputs[0].logprobs):
        row = expected[len(p) + i - 1]
        assert len(entry) == 5
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
            assert logprob.rank == 1 + int((row > row[token]).sum())
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(p)
    for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry[p[i]].logprob == pytest.approx(expected[i - 1][p[i]], abs=1e-4)
        assert set(np.argsort(-expected[i - 1])[:2]) <= set(entry)


def test_prompt_logprobs_of_one_token_are_one_none(llm: LLM) -> None:
    (output,) = llm.generate([[7]], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs == (None,)


@pytest.mark.parametrize("n", [1, 3])
def test_first_output_of_a_stream_has_the_prompt_logprobs(llm: LLM, n: int) -> None:
    params = SamplingParams(n=n, temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    (whole,) = llm.generate([prompt(21, 150)], params, use_tqdm=False)
    first, *rest = llm.stream(prompt(21, 150), params)
    assert whole.prompt_logprobs is not None
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert [piece.prompt_logprobs for piece in rest] == [None] * len(rest)
    assert {answer.index for piece in (first, *rest) for answer in piece.outputs} == set(range(n))


def test_overlap_does_not_change_tokens(tiny_model: Path, llm: LLM) -> None:
    prompts = [prompt(30 + i, 20 + i) for i in range(6)]
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=8, overlap=False) as plain:
        assert tokens(plain, prompts) == tokens(llm, prompts)


def test_sampled_answer_depends_on_its_seed_and_not_on_its_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=200, seed=7, max_tokens=10, ignore_eos=True)
    p = prompt(40, 33)
    (alone,) = tokens(llm, [p], params)
    others = [SamplingParams(temperature=0.7, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(6)]
    crowd = llm.generate([prompt(50 + i, 10 * i + 1) for i in range(6)] + [p], [*others, params], use_tqdm=False)
    assert crowd[-1].outputs[0].token_ids == alone
    (again,) = tokens(llm, [p], SamplingParams(temperature=1.0, top_p=0.9, top_k=200, seed=8, max_tokens=10))
    assert again != alone


def test_top_p_of_zero_is_greedy_in_a_mixed_batch(llm: LLM, reference: Reference) -> None:
    p = prompt(41, 20)
    drawn = SamplingParams(temperature=1.0, top_p=0.5, seed=1, max_tokens=6, ignore_eos=True)
    both = llm.generate([p, p], [SamplingParams(top_p=0, max_tokens=6), drawn], use_tqdm=False)
    assert list(both[0].outputs[0].token_ids) == list(reference.greedy(p, 6))


def test_seed_of_minus_one_is_random(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=-1, max_tokens=10, ignore_eos=True)
    assert params.seed is None
    first, second = tokens(llm, [prompt(42, 20)] * 2, params)
    assert first != second
    fixed = SamplingParams(temperature=1.0, seed=-2, max_tokens=10, ignore_eos=True)
    first, second = tokens(llm, [prompt(42, 20)] * 2, fixed)
    assert first == second


def test_n_answers_differ_and_come_in_order(llm: LLM) -> None:
    (output,) = llm.generate([prompt(60, 40)], SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True))
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert len({o.token_ids for o in output.outputs}) == 4
    assert all(o.finish_reason == "length" for o in output.outputs)


def test_n_greedy_answers_are_equal(llm: LLM, reference: Reference) -> None:
    p = prompt(61, 37)
    (output,) = llm.generate([p], SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True))
    assert {o.token_ids for o in output.outputs} == {reference.greedy(p, 6)}


def test_preempted_sequences_give_the_same_tokens(tiny_model: Path, reference: Reference) -> None:
    prompts = [prompt(70 + i, 60) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=8, kv_pages=24, max_model_len=128) as llm:
        answers = tokens(llm, prompts, params)
        scheduler = core_of(llm).scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.pages.used == 0
    assert answers == [reference.greedy(p, 60) for p in prompts]


def test_cached_prefix_is_used_without_changing_tokens(llm: LLM, reference: Reference) -> None:
    shared = prompt(80, 100)
    first, second = shared + prompt(81, 9), shared + prompt(82, 9)
    llm.generate([first], GREEDY, use_tqdm=False)
    (output,) = llm.generate([second], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 96
    assert output.outputs[0].token_ids == reference.greedy(second, 12)


def test_penalties_follow_their_definition(llm: LLM, reference: Reference) -> None:
    p = prompt(90, 25)
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True,
        repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2,
    )  # fmt: skip
    generated: list[int] = []
    for _ in range(10):
        logits = reference.logits(p + generated)[-1].astype(np.float64)
        seen = sorted(set(p + generated))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        for token in set(generated):
            logits[token] -= 0.3 * generated.count(token) + 0.2
        generated.append(int(logits.argmax()))
    assert tokens(llm, [p], params) == [tuple(generated)]


def test_logit_bias_forces_and_bans(llm: LLM, reference: Reference) -> None:
    p = prompt(100, 12)
    forced = SamplingParams(temperature=0, max_tokens=4, logit_bias={42: 100.0})
    assert tokens(llm, [p], forced) == [(42, 42, 42, 42)]
    likely = reference.greedy(p, 1)[0]
    (other,) = tokens(llm, [p], SamplingParams(temperature=0, max_tokens=1, logit_bias={likely: -100.0}))
    assert other != (likely,)


def test_stop_token_ends_an_answer_after_min_tokens(llm: LLM, reference: Reference) -> None:
    p = prompt(110, 12)
    stop = reference.greedy(p, 3)[2]
    first = reference.greedy(p, 3).index(stop) + 1
    (output,) = llm.generate([p], SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[stop]))
    assert len(output.outputs[0].token_ids) == first
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    (output,) = llm.generate([p], SamplingParams(temperature=0, max_tokens=9, min_tokens=6, stop_token_ids=[stop]))
    assert stop not in output.outputs[0].token_ids[:6]


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=1, max_tokens=6, seed=0), 1),
        (SamplingParams(top_p=1e-6, max_tokens=6, seed=0), 1),
        (SamplingParams(top_p=0, max_tokens=6, seed=0), 1),
        (SamplingParams(top_p=0, max_tokens=6, seed=0, frequency_penalty=1e-6), 1),
        (SamplingParams(min_p=1.0, max_tokens=6, seed=0), 1),
    ],
)
def test_filters_that_leave_one_token_are_greedy(llm: LLM, reference: Reference, params, allowed) -> None:
    p = prompt(120, 30)
    assert tokens(llm, [p], params) == [reference.greedy(p, 6)]


def test_stream_pieces_add_up(llm: LLM, reference: Reference) -> None:
    p = prompt(130, 18)
    pieces = list(llm.stream(p, GREEDY))
    assert sum((piece.outputs[0].token_ids for piece in pieces), ()) == reference.greedy(p, 12)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_streams_read_in_turns_with_a_call_between_keep_their_tokens(llm: LLM, reference: Reference) -> None:
    prompts = [prompt(85, 20), prompt(86, 40), prompt(87, 30)]
    streams = [llm.stream(p, GREEDY) for p in prompts[:2]]
    parts = [list(next(stream).outputs[0].token_ids) for stream in streams]
    (between,) = tokens(llm, prompts[2:])
    for pieces in zip(*streams, strict=True):
        for part, piece in zip(parts, pieces, strict=True):
            part += piece.outputs[0].token_ids
    assert [*map(tuple, parts), between] == [reference.greedy(p, 12) for p in prompts]
    assert engine_of(llm).idle


def test_stream_of_a_closed_llm_raises(tiny_model: Path) -> None:
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=2) as llm:
        stream = llm.stream([3, 4], GREEDY)
        next(stream)
    with pytest.raises(EngineStopped):
        list(stream)


def test_abandoned_stream_frees_its_pages(llm: LLM) -> None:
    for piece in llm.stream(prompt(131, 50), SamplingParams(max_tokens=100, ignore_eos=True)):
        assert not piece.finished
        break
    core = core_of(llm)
    assert core.idle
    assert core.scheduler.pages.used == 0


def test_embeddings_are_the_normalised_last_hidden_state(llm: LLM, reference: Reference) -> None:
    prompts = [prompt(140, 5), prompt(141, 90)]
    for p, embedding in zip(prompts, llm.embed(prompts, use_tqdm=False), strict=True):
        assert embedding.shape == (64,)
        assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
        expected = reference.hidden(p)[-1]
        np.testing.assert_allclose(embedding, expected / np.linalg.norm(expected), atol=1e-4)


def test_embedding_prompt_may_fill_the_context(llm: LLM, reference: Reference) -> None:
    p = prompt(142, llm.max_model_len)
    (embedding,) = llm.embed([p], use_tqdm=False)
    expected = reference.hidden(p)[-1]
    np.testing.assert_allclose(embedding, expected / np.linalg.norm(expected), atol=1e-4)
    with pytest.raises(PromptTooLong, match="maximum context length is 256 tokens"):
        llm.embed([[*p, 5]], use_tqdm=False)


def test_generate_accepts_more_prompts_than_the_queue_holds(tiny_model: Path) -> None:
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4, max_queued_requests=3) as llm:
        assert len(llm.generate([prompt(i, 5) for i in range(20)], GREEDY, use_tqdm=False)) == 20


def test_invalid_requests_name_the_field_and_leave_the_engine_usable(llm: LLM) -> None:
    for bad, error, field in (
        ([], RequestError, "prompt"),
        ([[]], RequestError, "prompt"),
        ([[500]], RequestError, "prompt"),
        ([[-1]], RequestError, "prompt"),
        ([list(range(3, 259))], PromptTooLong, "prompt"),
    ):
        if bad == []:
            assert llm.generate(bad, GREEDY, use_tqdm=False) == []
            continue
        with pytest.raises(error) as caught:
            llm.generate(bad, GREEDY, use_tqdm=False)
        assert caught.value.field == field
    with pytest.raises(RequestError, match="max_tokens is 1000, the limit is 246"):
        llm.generate([prompt(150, 10)], SamplingParams(max_tokens=1000), use_tqdm=False)
    assert engine_of(llm).idle
    assert len(tokens(llm, [prompt(151, 10)])[0]) == 12


@pytest.mark.parametrize(
    "bad",
    [42, b"x", [b"x"], [1.5], [True, False], [5, True], ["a", 3], [3, "a"], [None], {"prompt_token_ids": None}],
    ids=str,
)
def test_invalid_prompt_is_refused(llm: LLM, bad) -> None:
    with pytest.raises(RequestError, match="a prompt is a text, a list of token ids, or") as caught:
        llm.generate(bad, GREEDY, use_tqdm=False)
    assert caught.value.field == "prompt"


def test_missing_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="generate needs prompts or prompt_token_ids"):
        llm.generate(None, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("ids", [np.array([3, 4]), range(3, 5), {"prompt_token_ids": np.array([3, 4])}], ids=str)
def test_token_ids_are_accepted_in_any_sequence_type(llm: LLM, ids) -> None:
    (output,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == (3, 4)


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], 3])
def test_invalid_sampling_params_are_refused(llm: LLM, params) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([prompt(1, 5)], params, use_tqdm=False)


def test_text_prompt_without_a_tokenizer_names_the_missing_files(llm: LLM) -> None:
    uses = (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "hi"}]), lambda: llm.tokenizer)
    for use in uses:
        with pytest.raises(NoTokenizer, match=r"tokenizer\.json or tokenizer\.model") as error:
            use()
        assert isinstance(error.value, JaxserveError)
        assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("asked", [{"stop": ["a"]}, {"bad_words": ["a"]}])
def test_stop_strings_and_bad_words_without_a_tokenizer_are_refused(llm: LLM, asked: dict) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([prompt(1, 5)], SamplingParams(**asked), use_tqdm=False)


@pytest.mark.parametrize("asked", [{"stop": ["a"], "detokenize": False}, {"bad_words": "return"}, {"ignore_eos": "no"}])
def test_unsupported_sampling_params_are_refused(asked: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(asked))):
        SamplingParams(**asked)


def test_closed_llm_refuses_calls(tiny_model: Path) -> None:
    llm = LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=2)
    llm.close()
    with pytest.raises(EngineStopped):
        llm.generate([[3]], GREEDY)
