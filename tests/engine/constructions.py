"""Tokenizers of the constructions that models have, trained on a few lines."""

from collections.abc import Callable, Mapping

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as HfTokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

SPECIALS = ["<s>", "</s>", "<|a turn|>"]
SPACE = "\u2581"
CORPUS = ["def f(x):\n    return x * 2\n", "naïve café, 東京タワー 🦊🦊 Ωμέγα", "the quick brown fox " * 3]
# Added tokens with spaces, with a space of each encoding in them, and one that is normalised.
ADDED = [
    *(AddedToken(text, normalized=False) for text in ("two words", f"a{SPACE}b", "aĠb", "<tool>", " lead")),
    AddedToken("Normal Form", normalized=True),
    AddedToken("日本", normalized=False),
]


def byte_level(decoder: decoders.Decoder | None = None) -> HfTokenizer:
    """Return a byte-level tokenizer, as Llama 3, Qwen and GPT-2 have."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    return tokenizer


def byte_level_without_decoder() -> HfTokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = None
    return tokenizer


def from_gguf() -> HfTokenizer:
    """Return the decoder that Transformers writes for a byte-level vocabulary of a GGUF file."""
    replace = decoders.Replace(SPACE, " ")
    return byte_level(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), replace, decoders.ByteLevel()]))


def byte_fallback(*steps: decoders.Decoder) -> HfTokenizer:
    """Return a tokenizer of characters, and of bytes for unknown characters, as Llama 2 and Mistral have."""
    pieces = [*SPECIALS, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), SPACE, *"abcdefghijklmnopqrstuvwxyz.,é"]
    merges = [(SPACE, "a"), ("t", "h"), ("th", "e"), (SPACE, "the")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = HfTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIALS, "<unk>"]])
    tokenizer.add_tokens([token for token in ADDED if token.content != "Normal Form"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    usual = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(list(steps) or usual)
    return tokenizer


def other_order() -> HfTokenizer:
    replace = decoders.Replace(SPACE, " ")
    return byte_fallback(decoders.ByteFallback(), decoders.Fuse(), replace, decoders.Strip(" ", 1, 0))


def nested() -> HfTokenizer:
    inner = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback()])
    return byte_fallback(inner, decoders.Fuse(), decoders.Strip(" ", 1, 0))


def regex() -> HfTokenizer:
    """Return a decoder with a step whose effect on a token can only be measured."""
    replace = decoders.Replace(Regex(SPACE), " ")
    return byte_fallback(replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))


def metaspace(scheme: str = "always") -> HfTokenizer:
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def bare_metaspace() -> HfTokenizer:
    return metaspace("never")


def unigram() -> HfTokenizer:
    pieces = [("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256)), (SPACE, -3.0)]
    pieces += [(character, -4.0) for character in "abcdefghijklmnopqrstuvwxyz.,é"] + [(f"{SPACE}the", -2.0)]
    tokenizer = HfTokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def word_piece() -> HfTokenizer:
    words = [*"abcdefghijklmnopqrstuvwxyz.,!?'", "the", "do", "n't", "fox", "日本"]
    vocab = {word: id for id, word in enumerate(["[UNK]", *words, *(f"##{word}" for word in words)])}
    tokenizer = HfTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def word_level() -> HfTokenizer:
    tokenizer = HfTokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2, "日本": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def end_of_word() -> HfTokenizer:
    """Return a tokenizer that writes a space after a word unless it is the last one, as GPT-1 does."""
    pieces = ["<unk>", *"abcdefghijklmnopqrstuvwxyz", *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = HfTokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def context_of_bytes() -> HfTokenizer:
    """Return a tokenizer of bytes whose decoder joins the text in a way that no single token shows."""
    return byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")]))


# Byte-level and sentencepiece-like ones can write any text.
ANY_TEXT: Mapping[str, Callable[[], HfTokenizer]] = {
    each.__name__: each
    for each in (
        *(byte_level, byte_level_without_decoder, from_gguf),
        *(byte_fallback, other_order, nested, regex, metaspace, bare_metaspace, unigram),
    )
}
KNOWN = {**ANY_TEXT, "word_piece": word_piece, "word_level": word_level}
UNKNOWN = {"end_of_word": end_of_word, "context_of_bytes": context_of_bytes}
