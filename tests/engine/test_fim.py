"""Prompts that ask for the text between two others, in the forms of several families of models."""

import pytest
from tokenizers import AddedToken, Tokenizer as HfTokenizer, decoders, models, normalizers, pre_tokenizers

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.engine.fim import FORMS, FillInMiddle
from jaxserve.engine.tokenizer import Tokenizer

CODE_LLAMA, QWEN, DEEPSEEK, STARCODER, CODESTRAL = FORMS
LETTERS = "abcdefghijklmnopqrstuvwxyz():,\n"


def byte_level(*added: str) -> Tokenizer:
    """Return a tokenizer with one token per byte and added tokens, as Qwen has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *added])
    return Tokenizer(tokenizer, special_tokens={"eos_token": "<eos>"})


def sentencepiece(*added: str, sentinel: bool = True) -> Tokenizer:
    """Return a tokenizer of characters that puts a space before each text and adds a bos, as Llama 2 has.

    `sentinel`: the vocabulary has the character that precedes suffixes; otherwise it is written as bytes.
    """
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *LETTERS, "▁d", *("☺" if sentinel else "")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("▁", "d")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = HfTokenizer(model)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", *added)])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(tokenizer, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True)


def pieces(tokenizer: Tokenizer, ids) -> list[str]:
    return [tokenizer._tokenizer.id_to_token(token) for token in ids]


def written(form, prefix: str = "ab", suffix: str = "yz", **options) -> str:
    """Return a prompt of a byte-level tokenizer, with its markers."""
    tokenizer = byte_level(*form.markers)
    prompt = FillInMiddle(tokenizer).prompt(prefix, suffix, **options)
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def test_forms_are_those_of_the_models():
    assert written(QWEN) == "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
    assert written(DEEPSEEK) == "<｜fim▁begin｜>ab<｜fim▁hole｜>yz<｜fim▁end｜>"
    assert written(STARCODER) == "<fim_prefix>ab<fim_suffix>yz<fim_middle>"
    assert written(CODESTRAL) == "[SUFFIX]yz[PREFIX]ab"


def test_prompt_of_separate_parts_equals_the_tokens_of_the_whole_text():
    tokenizer = byte_level(*QWEN.markers)
    prompt = FillInMiddle(tokenizer).prompt("def f(x):\n", "  return é")
    text = "<|fim_prefix|>def f(x):\n<|fim_suffix|>  return é<|fim_middle|>"
    assert list(prompt.token_ids) == tokenizer.encode(text)


@pytest.mark.parametrize("sentinel", [True, False])
def test_code_llama_has_a_space_before_the_prefix_and_none_before_the_suffix(sentinel):
    tokenizer = sentencepiece(*CODE_LLAMA.markers, "▁<EOT>", sentinel=sentinel)
    fim = FillInMiddle(tokenizer)
    assert pieces(tokenizer, fim.prompt("def", "d)").token_ids) == [
        *("<s>", "▁<PRE>", "▁d", "e", "f", "▁<SUF>", "d", ")", "▁<MID>")
    ]
    assert pieces(tokenizer, fim.prompt(" def", " d").token_ids) == [
        *("<s>", "▁<PRE>", "▁", "▁d", "e", "f", "▁<SUF>", "▁d", "▁<MID>")
    ]
    assert pieces(tokenizer, fim.prompt("", "\n").token_ids) == ["<s>", "▁<PRE>", "▁<SUF>", "\n", "▁<MID>"]


def test_codestral_begins_with_bos_and_the_suffix():
    tokenizer = sentencepiece(*CODESTRAL.markers)
    prompt = FillInMiddle(tokenizer).prompt("d", "d")
    assert pieces(tokenizer, prompt.token_ids) == ["<s>", "[SUFFIX]", "d", "[PREFIX]", "▁d"]


def test_bos_is_left_out_on_request():
    tokenizer = sentencepiece(*CODE_LLAMA.markers)
    prompt = FillInMiddle(tokenizer).prompt("d", "d", add_special_tokens=False)
    assert pieces(tokenizer, prompt.token_ids) == ["▁<PRE>", "▁d", "▁<SUF>", "d", "▁<MID>"]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_bos_of_token_ids_stays_first_and_alone(add_special_tokens):
    tokenizer = sentencepiece(*CODE_LLAMA.markers)
    prompt = FillInMiddle(tokenizer).prompt(tokenizer.encode("d"), "d", add_special_tokens=add_special_tokens)
    assert pieces(tokenizer, prompt.token_ids) == ["<s>", "▁<PRE>", "▁d", "▁<SUF>", "d", "▁<MID>"]


@pytest.mark.parametrize("form", FORMS)
def test_place_of_the_prefix_is_known(form):
    tokenizer = byte_level(*form.markers)
    prompt = FillInMiddle(tokenizer).prompt("ab", "yz")
    assert tokenizer.decode(prompt.token_ids[prompt.prefix]) == "ab"


@pytest.mark.parametrize("form", FORMS)
def test_answer_ends_at_markers_and_at_the_end_tokens_that_the_vocabulary_has(form):
    ends = form.ends[:1]
    tokenizer = byte_level(*form.markers, *ends)
    assert set(FillInMiddle(tokenizer).end_token_ids) == set(map(tokenizer.token_id, (*form.markers, *ends)))


@pytest.mark.parametrize("missing", QWEN.markers)
def test_vocabulary_without_a_marker_is_refused_with_the_names_of_all(missing):
    markers = [marker for marker in QWEN.markers if marker != missing]
    with pytest.raises(UnsupportedParameter, match=r"<\|fim_prefix\|> <\|fim_suffix\|> <\|fim_middle\|>") as caught:
        FillInMiddle(byte_level(*markers))
    assert caught.value.field == "suffix"


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (4, "<|fim_prefix|>h<|fim_suffix|><|fim_middle|>"),
        (7, "<|fim_prefix|>fgh<|fim_suffix|>s<|fim_middle|>"),
        (11, "<|fim_prefix|>cdefgh<|fim_suffix|>st<|fim_middle|>"),
        (17, "<|fim_prefix|>abcdefgh<|fim_suffix|>stuvwx<|fim_middle|>"),
        (99, "<|fim_prefix|>abcdefgh<|fim_suffix|>stuvwxyz<|fim_middle|>"),
    ],
)
def test_truncation_keeps_what_is_nearest_to_the_gap(keep, left):
    assert written(QWEN, "abcdefgh", "stuvwxyz", keep=keep) == left


def test_truncation_of_a_long_suffix_leaves_a_short_prefix_whole():
    assert written(QWEN, "ab", "stuvwxyz", keep=8) == "<|fim_prefix|>ab<|fim_suffix|>stu<|fim_middle|>"
    assert written(QWEN, "", "stuvwxyz", keep=5) == "<|fim_prefix|><|fim_suffix|>st<|fim_middle|>"


def test_truncation_of_a_huge_text_gives_the_same_as_of_its_end():
    whole, end = written(QWEN, "ab" * 10_000, "yz" * 10_000, keep=20), written(QWEN, "ab" * 20, "yz" * 20, keep=20)
    assert whole == end


def test_truncation_to_the_markers_alone_is_refused():
    with pytest.raises(RequestError, match="it must be at least 4") as caught:
        written(QWEN, keep=3)
    assert caught.value.field == "truncate_prompt_tokens"
