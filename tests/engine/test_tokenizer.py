"""The tokenizer and its incremental detokenizer, against the tokenizers library's own decoding."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as HfTokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxserve.core.errors import CheckpointError, RequestError
from jaxserve.engine.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|a turn|>"]
CORPUS = ["def f(x):\n    return x * 2\n", "naïve café, 東京タワー 🦊🦊 Ωμέγα", "the quick brown fox " * 3]


def byte_level() -> HfTokenizer:
    """As in Llama 3, Qwen and GPT-2."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> HfTokenizer:
    """As in Llama 2 and Mistral: characters, and bytes for those that are not in the vocabulary."""
    pieces = [*SPECIALS, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz.,é"]
    merges = [("\u2581", "a"), ("t", "h"), ("th", "e"), ("\u2581", "the")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = HfTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIALS, "<unk>"]])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> HfTokenizer:
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> HfTokenizer:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, "game": 4}
    tokenizer = HfTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
BUILT = {name: Tokenizer(build(), special_tokens={"eos_token": "</s>"}) for name, build in KINDS.items()}


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: bool) -> str:
    """The text of a stream that is fed pieces of these sizes, over and over."""
    stream, text, position, turn = tokenizer.stream(**options), "", 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        text += stream.push(ids[position : position + size])
        position, turn = position + size, turn + 1
    return text + stream.flush()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), skip=st.booleans())
def test_stream_of_a_text_equals_its_decoding(kind, text, sizes, skip):
    tokenizer = BUILT[kind]
    ids = tokenizer.encode(text)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(tokenizer, ids, sizes, skip_special_tokens=skip, start=True) == expected


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), skip=st.booleans())
def test_stream_of_any_byte_level_tokens_equals_their_decoding(data, sizes, skip):
    tokenizer = BUILT["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(tokenizer, ids, sizes, skip_special_tokens=skip, start=True) == expected


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_text_that_goes_on_keeps_its_leading_space(kind):
    tokenizer = BUILT[kind]
    ids = tokenizer.encode("the the")
    assert streamed(tokenizer, ids, [1]) == " the the"
    assert streamed(tokenizer, ids, [1], start=True) == tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_replacement_character_while_a_character_is_incomplete(kind):
    tokenizer = BUILT[kind]
    ids = tokenizer.encode("\U0001f9e0")  # in no vocabulary: several bytes
    stream = tokenizer.stream(start=True)
    pieces = [stream.push([id]) for id in ids]
    assert len(ids) > 1
    assert "".join(pieces[:-1]).strip() == ""
    assert pieces[-1] == "\U0001f9e0"


def test_incomplete_character_shows_at_the_end_only():
    tokenizer = BUILT["byte_level"]
    first, *_ = tokenizer.encode("\U0001f9e0")
    stream = tokenizer.stream()
    assert stream.push([first]) == ""
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_hidden_or_shown():
    tokenizer = BUILT["byte_level"]
    ids = tokenizer.encode("fox<|a turn|>x</s>")
    assert streamed(tokenizer, ids, [1]) == "foxx"
    assert streamed(tokenizer, ids, [1], skip_special_tokens=False) == "fox<|a turn|>x</s>"


def test_other_decoders_stream_too():
    tokenizer = Tokenizer(word_piece())
    ids = tokenizer.encode("playing the game playing")
    assert streamed(tokenizer, ids, [1]) == tokenizer.decode(ids) == "playing the game playing"


def test_token_text_and_bytes():
    tokenizer = BUILT["byte_level"]
    ids = tokenizer.encode("東 quick")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "東 quick"
    assert tokenizer.token(ids[-1]).strip() != ""
    assert tokenizer.token(10**6) == ""


def test_lone_surrogate_is_the_callers_mistake():
    with pytest.raises(RequestError, match="surrogate"):
        BUILT["byte_level"].encode("a\ud800b")


# loading


@pytest.fixture
def folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_load_reads_special_tokens(folder):
    write(folder, "generation_config.json", {"eos_token_id": [2, 7]})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (2, 7, 1)


def test_add_bos_token_of_the_configuration_wins(folder):
    assert Tokenizer.load(folder).encode("fox")[0] != 0
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("fox")[0] == 0
    assert tokenizer.encode("fox", add_special_tokens=False)[0] != 0


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    source = byte_level()
    source.enable_truncation(3)
    source.enable_padding(length=64)
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    text = "zyx wvu tsr"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_missing_or_broken_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


# chat templates

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&'hi'</b>"}]


def test_default_template(folder):
    prompt = Tokenizer.load(folder).apply_chat_template(CHAT)
    assert prompt == "System: Be brief.\nUser: <b>&'hi'</b>\nAssistant:"


def test_template_of_the_model(folder):
    template = (
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "{% generation %}[{{ m.role }}] {{ m | tojson }}{% endgeneration %}\n{% endfor %}"
        "{% if thinking %}<think>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    prompt = Tokenizer.load(folder).apply_chat_template(CHAT[1:], thinking=True)
    assert prompt == '<s>[user] {"role": "user", "content": "<b>&\'hi\'</b>"}<think>'


def test_content_may_come_in_parts(folder):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert Tokenizer.load(folder).apply_chat_template(parts) == "User: a\nb\nAssistant:"
    for other in ({"type": "image_url"}, {"type": "text"}, "text"):
        with pytest.raises(RequestError, match="text only"):
            Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": [other]}])


def test_named_templates_take_the_default(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "hello"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(folder).apply_chat_template(CHAT) == "hello"


def test_continue_final_message(folder):
    messages = [*CHAT, {"role": "assistant", "content": "Sure, "}]
    tokenizer = Tokenizer.load(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("\nAssistant: Sure,")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_template_can_refuse_but_not_escape(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer.load(folder).apply_chat_template(CHAT)


def test_content_is_never_a_template(folder):
    prompt = Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": "{{ 7 * 7 }}"}])
    assert "{{ 7 * 7 }}" in prompt


def test_broken_template_is_the_checkpoints_fault(folder):
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template"):
        Tokenizer.load(folder).apply_chat_template(CHAT)
