"""Tokenizer: a model's tokenizer.json with its special tokens and its chat template. Imports no JAX."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from jaxserve.core.errors import CheckpointError, RequestError
from jaxserve.core.request import Detokenizer
from jaxserve.engine.chat_template import DEFAULT_TEMPLATE, ChatTemplate, Message
from jaxserve.engine.detokenizer import ByteDetokenizer, StreamDetokenizer, byte_table

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Thread-safe; encoding does not hold the interpreter's lock."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        """`add_bos`: whether `encode` adds the bos token, None: what tokenizer.json says."""
        special = dict(special_tokens or {})
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(id for id, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._byte_table = byte_table(tokenizer.decoder)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of(special.get("bos_token"))
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *self._ids_of(special.get("eos_token"))]))
        self._add_bos = add_bos
        self.has_chat_template = chat_template is not None
        self._chat_template = ChatTemplate(chat_template or DEFAULT_TEMPLATE, special)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a model's folder, or a tokenizer.json. Raises CheckpointError naming the file that is at fault."""
        path = Path(path)
        folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
        if not file.is_file():
            raise CheckpointError(f"there is no {file}; a tokenizer in Hugging Face's tokenizer.json format is needed")
        try:
            tokenizer = HfTokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{file} is not a valid tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        return cls(
            tokenizer,
            special_tokens=_special_tokens(config),
            eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
            add_bos=config.get("add_bos_token"),
            chat_template=_chat_template(folder, config),
        )

    def save(self, file: str | Path) -> None:
        """Writes a tokenizer.json; the special tokens' names and the chat template live in other files."""
        self._tokenizer.save(str(file))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Raises RequestError for a string that is not valid Unicode."""
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError("the text is not valid Unicode (it has a lone surrogate)", field="prompt") from error
        return self._mend_bos(ids) if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids that begin a text; ids outside the vocabulary are left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, *, start: bool = False) -> Detokenizer:
        """A new incremental detokenizer.

        `start`: the tokens begin a text, as in `decode`, which drops the space that sentencepiece puts in front of
        it; otherwise they go on from a prompt, and the space stays.
        """
        if self._byte_table is None:
            return StreamDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)
        token_bytes = self._visible_bytes if skip_special_tokens else self.token_bytes
        return ByteDetokenizer(token_bytes, strip_space=start and self._byte_table[1])

    def ordinary_ids(self) -> list[int]:
        """The ids that stand for text, in order: all but those of tokens added to the vocabulary, special or not."""
        added = self._tokenizer.get_added_tokens_decoder().keys()
        return sorted(set(self._tokenizer.get_vocab(with_added_tokens=False).values()) - added)

    def token(self, token_id: int) -> str:
        """The text of one token as it stands inside a text; an incomplete character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def max_characters(self, num_tokens: int) -> int:
        """A text of more characters than this has more than `num_tokens` tokens."""
        return num_tokens * max(self._longest_token, 16)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation, to be encoded without special tokens. See `ChatTemplate.render`."""
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def _mend_bos(self, ids: list[int]) -> list[int]:
        """Adds or takes away the bos token where tokenizer.json and the configuration disagree."""
        bos = self.bos_token_id
        has = bos is not None and ids[:1] == [bos]
        if bos is None or self._add_bos is None or has == self._add_bos:
            return ids
        return ids[1:] if has else [bos, *ids]

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_table is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._byte_table[0](token)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _ids_of(self, token: str | None) -> list[int]:
        found = self._id_of(token)
        return [] if found is None else [found]


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file, {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
