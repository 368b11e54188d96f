"""The tokenizer and its incremental detokenizer, against the tokenizers library's own decoding."""

import json
import pickle

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer as HfTokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from jaxserve.core.errors import CheckpointError, ConfigError, RequestError
from jaxserve.engine.chat_template import BUILTIN_TEMPLATES, MAX_CACHED_ROLES, ChatTemplate
from jaxserve.engine.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|a turn|>"]
CORPUS = ["def f(x):\n    return x * 2\n", "naïve café, 東京タワー 🦊🦊 Ωμέγα", "the quick brown fox " * 3]


def byte_level() -> HfTokenizer:
    """Return a byte-level tokenizer, as Llama 3, Qwen and GPT-2 have."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> HfTokenizer:
    """Return a tokenizer of characters, and of bytes for unknown characters, as Llama 2 and Mistral have."""
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
    """Return the text of a stream that is fed pieces of these sizes in turn."""
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
def test_continued_text_keeps_its_leading_space(kind):
    tokenizer = BUILT[kind]
    ids = tokenizer.encode("the the")
    assert streamed(tokenizer, ids, [1]) == " the the"
    assert streamed(tokenizer, ids, [1], start=True) == tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_stream_shows_no_replacement_character_while_a_character_is_incomplete(kind):
    tokenizer = BUILT[kind]
    ids = tokenizer.encode("\U0001f9e0")  # in no vocabulary: several bytes
    stream = tokenizer.stream(start=True)
    pieces = [stream.push([id]) for id in ids]
    assert len(ids) > 1
    assert "".join(pieces[:-1]).strip() == ""
    assert pieces[-1] == "\U0001f9e0"


def test_incomplete_character_is_shown_only_at_the_end():
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


def test_other_decoders_can_stream():
    tokenizer = Tokenizer(word_piece())
    ids = tokenizer.encode("playing the game playing")
    assert streamed(tokenizer, ids, [1], start=True) == tokenizer.decode(ids) == "playing the game playing"
    assert streamed(tokenizer, ids[2:], [1]) == " the game playing"  # the text goes on


def test_token_bytes_join_to_the_encoded_text():
    tokenizer = BUILT["byte_level"]
    ids = tokenizer.encode("東 quick")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "東 quick"
    assert tokenizer.token(ids[-1]).strip() != ""
    assert tokenizer.token(10**6) == ""


@pytest.mark.parametrize(("name", "expected"), [("plain", True), ("chatml", True), ("vicuna", False)])
def test_template_shows_whether_it_takes_late_system_messages(name, expected):
    tokenizer = Tokenizer(byte_level(), chat_template=BUILTIN_TEMPLATES[name])
    assert tokenizer.takes_late_system_messages is expected


def test_lone_surrogate_is_refused_as_a_request_error():
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


def test_tokenizer_load_reads_special_tokens(folder):
    write(folder, "generation_config.json", {"eos_token_id": [2, 7]})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (2, 7, 1)


def test_add_bos_token_of_the_configuration_overrides_the_file(folder):
    assert Tokenizer.load(folder).encode("fox")[0] != 0
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("fox")[0] == 0
    assert tokenizer.encode("fox", add_special_tokens=False)[0] != 0


@pytest.fixture
def with_edges(folder):
    """A folder with a tokenizer that puts <s> before and </s> after every text."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [0], [1]),
        ({"add_bos_token": True}, [0], [1]),
        ({"add_bos_token": False}, [], [1]),
        ({"add_eos_token": False}, [0], []),
        ({"add_bos_token": False, "add_eos_token": False}, [], []),
    ],
)
def test_add_bos_and_add_eos_false_remove_only_what_the_file_adds(with_edges, flags, before, after):
    write(with_edges, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", **flags})
    tokenizer = Tokenizer.load(with_edges)
    fox = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [*before, *fox, *after]
    assert tokenizer.encode("<s>fox</s>") == [*before, 0, *fox, 1, *after], "what the text has itself stays"
    assert tokenizer.encode("") == [*before, *after]


def test_bos_written_in_the_text_is_kept(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<|a turn|>", "add_bos_token": False})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<|a turn|>fox")[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer.encode("<|a turn|>fox"), skip_special_tokens=False) == "<|a turn|>fox"


def test_bos_requested_by_the_configuration_is_not_doubled(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": True})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<s>fox") == tokenizer.encode("fox")
    assert tokenizer.encode("fox")[-1] != tokenizer.bos_token_id, "no eos is named, so none can be added"


def test_add_bos_token_false_keeps_an_eos_equal_to_the_bos(folder):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": False})
    fox = Tokenizer.load(folder).encode("fox", add_special_tokens=False)
    assert Tokenizer.load(folder).encode("fox") == [*fox, 0]


# special tokens of the other files


def test_special_tokens_map_alone_names_the_special_tokens(folder):
    write(folder, "tokenizer_config.json", {})
    write(folder, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_special_tokens_map_is_used_unless_added_tokens_are_listed(folder, caplog):
    write(folder, "special_tokens_map.json", {"eos_token": "<|a turn|>"})
    assert Tokenizer.load(folder).eos_token_ids == (2,)
    assert "'</s>' in tokenizer_config.json and '<|a turn|>' in special_tokens_map.json" in caplog.text
    write(folder, "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": {}})
    assert Tokenizer.load(folder).eos_token_ids == (1,)


@pytest.mark.parametrize("listed", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_of_the_other_files_are_in_the_vocabulary(folder, listed, caplog):
    size = byte_level().get_vocab_size()
    tokens = {"<|im_start|>": size, "<|im_end|>": size + 1}
    config = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    if listed == "added_tokens.json":
        write(folder, listed, tokens)
    else:
        config["added_tokens_decoder"] = {str(id): {"content": text, "special": True} for text, id in tokens.items()}
    write(folder, "tokenizer_config.json", config)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_token_ids == (size + 1,)
    assert tokenizer.encode("<|im_start|><|im_end|>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == ""
    assert not caplog.records


def test_added_tokens_with_used_ids_are_ignored_with_a_warning(folder, caplog):
    size = byte_level().get_vocab_size()
    listed = {str(size + 5): {"content": "<far>"}, "7": {"content": "</s>"}, "2": {"content": "<|a turn|>"}}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": listed})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == size
    assert "2 tokens cannot have the ids" in caplog.text
    assert f"'<far>' ({size + 5}, not {size})" in caplog.text
    assert "'</s>' (7, not 1)" in caplog.text


def test_added_tokens_of_a_vocabulary_that_skips_ids_do_not_take_used_ids(tmp_path, caplog):
    letters = dict(zip("abcdefgh", (0, 1, 3, 4, 6, 7, 8, 9), strict=True))  # the library would give 8 to the next token
    source = HfTokenizer(models.BPE(letters, []))
    source.decoder = decoders.Fuse()
    source.save(str(tmp_path / "tokenizer.json"))
    listed = {"8": {"content": "<used>"}, "10": {"content": "<far>"}}
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": listed})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("gh") == [8, 9]
    assert tokenizer.decode([8, 9]) == "gh"
    assert tokenizer.vocab_size == len(letters)
    assert "2 tokens cannot have the ids" in caplog.text


def test_special_token_outside_the_vocabulary_gives_a_warning(folder, caplog):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    assert Tokenizer.load(folder).eos_token_ids == ()
    assert "the eos_token is '<|im_end|>', which is not in the vocabulary" in caplog.text


def test_special_token_from_the_plain_vocabulary_is_special(folder):
    piece = next(text for text in byte_level().get_vocab(with_added_tokens=False) if text == "qu")
    write(folder, "tokenizer_config.json", {"eos_token": piece})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("fox" + piece)[-1] == tokenizer.eos_token_ids[0]
    assert tokenizer.decode(tokenizer.encode("fox" + piece)) == "fox"


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4": "a"}}),
        ("tokenizer_config.json", {"add_bos_token": "yes"}),
        ("tokenizer_config.json", {"chat_template": 3}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}),
        ("tokenizer_config.json", {"extra_special_tokens": 3}),
        ("added_tokens.json", {"<a>": None}),
        ("generation_config.json", {"eos_token_id": {}}),
        ("generation_config.json", {"eos_token_id": [2, "</s>"]}),
    ],
)
def test_error_for_a_malformed_tokenizer_file_names_it(folder, file, value):
    write(folder, file, value)
    with pytest.raises(CheckpointError, match=file):
        Tokenizer.load(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_pointer_of_git_lfs_is_refused_by_name(folder, file):
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5000000\n")
    with pytest.raises(CheckpointError, match=rf"{file}: is only Git LFS's pointer .*git lfs pull"):
        Tokenizer.load(folder)


def test_template_file_that_is_not_utf8_is_a_checkpoint_error(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=r"cannot read .*chat_template\.jinja"):
        Tokenizer.load(folder)


def test_pickled_tokenizer_encodes_and_decodes_as_the_original(folder):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True, "chat_template": template}
    write(folder, "tokenizer_config.json", config)
    tokenizer = Tokenizer.load(folder)
    other = pickle.loads(pickle.dumps(tokenizer))
    assert other.encode("the fox") == tokenizer.encode("the fox")
    assert (other.bos_token_id, other.eos_token_ids) == (0, (1,))
    assert other.decode(other.encode("the fox")) == "the fox"
    assert other.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_truncation_and_padding_of_the_tokenizer_file_are_ignored(tmp_path):
    source = byte_level()
    source.enable_truncation(3)
    source.enable_padding(length=64)
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    text = "zyx wvu tsr"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_error_for_a_missing_or_broken_tokenizer_names_the_file(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


# chat templates

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&'hi'</b>"}]


def test_model_without_a_template_uses_the_plain_format(folder):
    prompt = Tokenizer.load(folder).apply_chat_template(CHAT)
    assert prompt == "System: Be brief.\nUser: <b>&'hi'</b>\nAssistant:"


def test_plain_format_begins_with_the_bos_that_every_text_gets(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    assert tokenizer.builtin_template == "plain"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<s>User: hi\nAssistant:"
    assert tokenizer.encode(prompt, add_special_tokens=False)[0] == 0


CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "How?"},
]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and"
    " polite answers to the user's questions. USER: Hi ASSISTANT: Hello</s>USER: How? ASSISTANT:"
)


@pytest.mark.parametrize("name", ["vicuna-7b-v1.5", "my-model", "models--lmsys--vicuna-7b-v1.5/snapshots/0123"])
def test_vicuna_model_uses_its_built_in_template(tmp_path, name):
    model = tmp_path / name
    model.mkdir(parents=True)
    byte_level().save(str(model / "tokenizer.json"))
    write(model, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    write(model, "config.json", {"_name_or_path": "lmsys/vicuna-7b-v1.5" if name == "my-model" else ""})
    assert Tokenizer.load(model).apply_chat_template(CONVERSATION) == "<s>" + VICUNA
    system = [{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]]
    assert Tokenizer.load(model).apply_chat_template(system) == "<s>Be brief. USER: Hi ASSISTANT:"


def test_template_given_by_name_or_file_is_used(folder, tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    named = [{"name": "tool_use", "template": "{% for m in messages %}({{ m.content }}){% endfor %}"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})

    def prompt(template):
        return Tokenizer.load(folder, template).apply_chat_template(CONVERSATION[:1])

    assert prompt(str(tmp_path / "mine.jinja")) == prompt(tmp_path / "mine.jinja") == "<Hi>"
    assert prompt("tool_use") == "(Hi)"
    assert prompt("{% for m in messages %}[{{ m.content }}]{% endfor %}") == "[Hi]"
    assert prompt("chatml") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(None) == "User: Hi\nAssistant:", "there is no template called default"
    with pytest.raises(ConfigError, match=r"unknown chat template .nothing.: .*tool_use.*--chat-template"):
        prompt("nothing")


def test_template_file_of_the_model_is_preferred_and_logged(folder, caplog):
    write(folder, "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert Tokenizer.load(folder).apply_chat_template(CONVERSATION[:1]) == "Hi"
    assert "chat_template.jinja is used" in caplog.text


def test_template_in_the_tokenizer_configuration_is_used(folder):
    template = (
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "{% generation %}[{{ m.role }}] {{ m | tojson }}{% endgeneration %}\n{% endfor %}"
        "{% if thinking %}<think>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    prompt = Tokenizer.load(folder).apply_chat_template(CHAT[1:], thinking=True)
    assert prompt == '<s>[user] {"role": "user", "content": "<b>&\'hi\'</b>"}<think>'


def test_message_content_in_parts_is_joined(folder):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert Tokenizer.load(folder).apply_chat_template(parts) == "User: a\nb\nAssistant:"
    for other in ({"type": "image_url"}, {"type": "text"}, "text"):
        with pytest.raises(RequestError, match="text only"):
            Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": [other]}])


def test_list_of_named_templates_uses_the_default(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "hello"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(folder).apply_chat_template(CHAT) == "hello"


CHATML = "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}{% endfor %}"
TRIMMED = "{% for m in messages %}{{'<' + m.role + '>\n\n' + m.content | trim + '<|eot_id|>'}}{% endfor %}"


def open_prompt(template, content, role="assistant"):
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": content}]
    return ChatTemplate(template).render(messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize(
    "content", ["<", "|", "e", "d", "end", "```json\n", "Answer: ", "<think>\n", "", " two  ", "hi", "<|im_end|>\n"]
)
def test_continued_message_ends_the_prompt(content, role):
    assert open_prompt(CHATML, content, role) == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>{role}\n{content}"


@pytest.mark.parametrize("content", ["<", "e", "Answer: ", "```json\n", "  a  b "])
def test_continued_message_trimmed_by_the_template_stays_open(content):
    assert open_prompt(TRIMMED, content) == f"<user>\n\nhi<|eot_id|><assistant>\n\n{content.strip()}"


def test_message_without_text_is_continued_at_its_beginning_and_one_with_a_number_refused():
    assert open_prompt(CHATML, None) == open_prompt(CHATML, "")
    with pytest.raises(RequestError, match="content is 7: it must be a text"):
        open_prompt(CHATML, 7)


def test_continuation_of_a_message_cut_by_the_template_is_refused():
    with pytest.raises(RequestError, match="cannot be continued"):
        open_prompt("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", "a</think>b")


# roles

QWEN = (
    "{% if messages[0].role == 'system' %}{{ '<system>' + messages[0].content }}{% else %}<system>default{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ '<' + m.role + '>' + m.content }}{% endif %}"
    "{% endfor %}"
)


def rendered(template, *roles):
    return ChatTemplate(template).render([{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)])


def test_developer_role_becomes_system_unless_the_template_knows_it():
    assert rendered(QWEN, "developer", "user") == "<system>text 0<user>text 1"
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{# developer #}{% endfor %}"
    assert rendered(template, "developer") == "developertext 0"


@pytest.mark.parametrize(
    ("roles", "position", "role"),
    [
        (["critic", "user"], 0, "critic"),
        (["user", "critic"], 1, "critic"),
        (["system", "user", "system", "user"], 2, "system"),
        (["system", "developer", "user"], 1, "system"),
        (["critic"], 0, "critic"),
    ],
)
def test_message_omitted_by_the_template_is_refused(roles, position, role):
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError, match=rf"leaves out message {position} \(role '{role}'\)"):
            rendered(QWEN, *roles)


def test_message_omitted_from_a_long_conversation_is_found():
    show = "{% for m in messages %}{% if loop.index0 != 20000 %}{{ m.content }},{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "a"}] * 25_000
    with pytest.raises(RequestError, match="leaves out message 20000 "):
        ChatTemplate(show).render(messages)
    reversed_order = ChatTemplate("{% for m in messages | reverse %}{{ m.content }},{% endfor %}")
    assert reversed_order.render(messages[:100]) == "a," * 100


def test_check_of_long_conversations_is_not_cached():
    template = ChatTemplate(CHATML)
    for count, cached in ((MAX_CACHED_ROLES, 1), (MAX_CACHED_ROLES + 1, 1), (MAX_CACHED_ROLES - 1, 2)):
        template.render([{"role": "user", "content": "a"}] * count)
        assert template._cached_dropped.cache_info().currsize == cached


def test_template_showing_any_role_or_part_of_a_message_is_accepted():
    assert rendered(CHATML, "critic").startswith("<|im_start|>critic\ntext 0")
    shortened = ChatTemplate("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    assert shortened.render([{"role": "assistant", "content": "thought</think>said"}]) == "said"


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
def test_template_can_refuse_messages_but_not_leave_the_sandbox(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer.load(folder).apply_chat_template(CHAT)


def test_message_content_is_never_rendered_as_a_template(folder):
    prompt = Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": "{{ 7 * 7 }}"}])
    assert "{{ 7 * 7 }}" in prompt


def test_broken_template_is_a_checkpoint_error(folder):
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match=f"{folder}: the chat template is not valid Jinja"):
        Tokenizer.load(folder)
    other = folder / "other.jinja"
    other.write_text("{{ ")
    with pytest.raises(CheckpointError, match=f"{other}: the chat template is not valid Jinja"):
        Tokenizer.load(folder, other)


@pytest.mark.parametrize("messages", ["hi", [["role", "user"]], [None]])
def test_message_that_is_not_an_object_is_a_request_error(folder, messages):
    with pytest.raises(RequestError, match=r"it must be .* object with role and content"):
        Tokenizer.load(folder).apply_chat_template(messages)


def test_conversation_with_tools_uses_the_template_for_tools(folder):
    named = [
        {"name": "default", "template": "plain{% for m in messages %} {{ m.content }}{% endfor %}"},
        {"name": "tool_use", "template": "{{ tools | length }} tools {{ messages[0].content }}"},
    ]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "plain hi"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "1 tools hi"
    chosen = Tokenizer.load(folder, chat_template="default")
    assert chosen.apply_chat_template(messages, tools=[{}]).startswith("plain")


def test_arguments_of_calls_reach_the_template_as_objects():
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
    source = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}{{ tools }}"
    template = ChatTemplate(source)
    call = {"function": {"name": "f", "arguments": '{"a": 5}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert template.render(messages) == "hi5None"
    with pytest.raises(RequestError, match="tool_calls"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [5]}])
