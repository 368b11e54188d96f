"""The tokenizer: a model's vocabulary with its special tokens and its chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as HfTokenizer

from jaxserve.core.errors import CheckpointError, RequestError
from jaxserve.core.request import Detokenizer
from jaxserve.engine.chat_template import PLAIN, ChatTemplate, Message
from jaxserve.engine.detokenizer import ByteDetokenizer, StreamDetokenizer, byte_table
from jaxserve.engine.tokenizer_files import TokenizerFiles, choose_template, vocabulary_file

TOOL_USE = "tool_use"  # the name of the template that some models have for conversations with tools
PROBE = "a"  # a text that is encoded to find the special tokens around it
# A character that no token has in common with others: what follows it is encoded as inside a text.
ALONE = "\u263a"


class Tokenizer:
    """A thread-safe conversion of text to token ids and back. Encoding does not hold the interpreter's lock."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
        builtin_template: str | None = None,
        tool_template: str | None = None,
    ):
        """`add_bos`, `add_eos`: whether `encode` puts these tokens around a text; None: as tokenizer.json says.

        `builtin_template`: the name of `chat_template` if it is a built-in template. `tool_template`: the chat template
        of conversations with tools, if it is another one. Raise `CheckpointError` if a chat template is invalid.
        """
        self._options: dict[str, Any] = {
            "special_tokens": special_tokens,
            "eos_token_ids": tuple(eos_token_ids),
            "add_bos": add_bos,
            "add_eos": add_eos,
            "chat_template": chat_template,
            "builtin_template": builtin_template,
            "tool_template": tool_template,
        }
        special = dict(special_tokens or {})
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_ids = frozenset(id for id, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._byte_table = byte_table(tokenizer.decoder)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of(special.get("bos_token"))
        eos = self._id_of(special.get("eos_token"))
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        whole, bare = self._encode(PROBE, True), self._encode(PROBE, False)
        self._bos = _Edge(self.bos_token_id, add_bos, self.bos_token_id in whole[:1] and whole[:1] != bare[:1])
        self._eos = _Edge(eos, add_eos, eos in whole[-1:] and whole[-1:] != bare[-1:])
        self.has_chat_template = chat_template is not None and builtin_template is None
        self.builtin_template = builtin_template if chat_template is not None else "plain"
        if not self.has_chat_template and not self._bos.wanted:
            special.pop("bos_token", None)
        self._chat_template = ChatTemplate(chat_template or PLAIN, special)
        self._tool_template = self._chat_template if tool_template is None else ChatTemplate(tool_template, special)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    @classmethod
    def load(cls, path: str | Path, chat_template: str | Path | None = None) -> "Tokenizer":
        """Read a model's folder, or its tokenizer.json or tokenizer.model.

        `chat_template`: used instead of the model's own, as `EngineConfig.chat_template`. Raise `CheckpointError`
        naming the file at fault, or `ConfigError` if the chat template does not exist.
        """
        path = Path(path)
        files = TokenizerFiles.read(path)
        given = None if chat_template is None else str(chat_template)
        template, builtin = choose_template(given, files.chat_templates, vocabulary_file(path).parent)
        try:
            return cls(
                files.tokenizer,
                special_tokens=dict(files.special_tokens),
                eos_token_ids=files.eos_token_ids,
                add_bos=files.add_bos,
                add_eos=files.add_eos,
                chat_template=template,
                builtin_template=builtin,
                tool_template=files.chat_templates.get(TOOL_USE) if chat_template is None else None,
            )
        except CheckpointError as error:  # the template is invalid
            raise CheckpointError(f"{path if given is None else given}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickling needs to make this tokenizer again, as for a pool of processes."""
        return partial(type(self), self._tokenizer, **self._options), ()

    def save(self, file: str | Path) -> None:
        """Write a tokenizer.json, without the special tokens' names and the chat template, which have other files."""
        self._tokenizer.save(str(file))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raise `RequestError` for a string that is not valid Unicode."""
        try:
            ids = self._encode(text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise RequestError("the text is not valid Unicode (it has a lone surrogate)", field="prompt") from error
        return self._with_edges(ids) if add_special_tokens else ids

    def encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text inside another: without the space that sentencepiece puts before a text.

        Raise `RequestError` as `encode`.
        """
        if self._byte_table is None or not self._byte_table[1]:
            return self.encode(text, add_special_tokens=False)
        start = self._encode(ALONE, False)
        return self.encode(ALONE + text, add_special_tokens=False)[len(start) :]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """The bos token if `encode` begins texts with it."""
        return (self.bos_token_id,) if self._bos.wanted and self.bos_token_id is not None else ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids that begin a text. Ids outside the vocabulary are ignored."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, *, start: bool = False) -> Detokenizer:
        """Return a new incremental detokenizer.

        `start`: the tokens begin a text, so that the space that sentencepiece puts before it is dropped as in `decode`.
        Otherwise they continue a prompt, and the space stays.
        """
        if self._byte_table is None:
            return StreamDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)
        token_bytes = self._visible_bytes if skip_special_tokens else self.token_bytes
        return ByteDetokenizer(token_bytes, strip_space=start and self._byte_table[1])

    def ordinary_ids(self) -> list[int]:
        """Return the sorted ids of the vocabulary without added tokens, special or not."""
        added = self._tokenizer.get_added_tokens_decoder().keys()
        return sorted(set(self._tokenizer.get_vocab(with_added_tokens=False).values()) - added)

    def token(self, token_id: int) -> str:
        """Return the text of one token inside a text, with U+FFFD for an incomplete character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def max_characters(self, num_tokens: int) -> int:
        """Return an upper bound on the characters of a text of `num_tokens` tokens."""
        return num_tokens * max(self._longest_token, 16)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the prompt of a conversation as `ChatTemplate.render`. Encode it without special tokens."""
        template = self._tool_template if variables.get("tools") else self._chat_template
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    @property
    def template_source(self) -> str:
        """The text of the chat template for conversations with tools."""
        return self._tool_template.source

    @property
    def template_knows_tools(self) -> bool:
        """True if the chat template itself writes the definitions of tools."""
        return self._tool_template.knows_tools

    @cached_property
    def takes_late_system_messages(self) -> bool:
        """True if the chat template shows system messages that follow other messages."""
        roles = ("user", "system", "assistant", "user", "system")
        try:
            self.apply_chat_template([{"role": role, "content": role} for role in roles])
        except RequestError:
            return False
        return True

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of all special tokens by their texts."""
        return {text: id for id in sorted(self.special_ids) if (text := self._tokenizer.id_to_token(id)) is not None}

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _with_edges(self, ids: list[int]) -> list[int]:
        """Add the bos and eos tokens, or remove those that tokenizer.json added, as the configuration says.

        A bos with which the text itself begins stays, and no second one is added.
        """
        bos, eos = self._bos, self._eos
        if bos.extra:
            ids = ids[1:]
        if eos.extra:
            ids = ids[:-1]
        if bos.missing and bos.id is not None and ids[:1] != [bos.id]:
            ids = [bos.id, *ids]
        if eos.missing and eos.id is not None and ids[-1:] != [eos.id]:
            ids = [*ids, eos.id]
        return ids

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_table is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._byte_table[0](token)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.token_id(token)


class _Edge(NamedTuple):
    """A special token at one end of every text."""

    id: int | None
    asked: bool | None  # whether the configuration wants it; None: as tokenizer.json does
    added: bool  # whether tokenizer.json adds it

    @property
    def wanted(self) -> bool:
        return self.id is not None and (self.added if self.asked is None else self.asked)

    @property
    def missing(self) -> bool:
        return self.wanted and not self.added

    @property
    def extra(self) -> bool:
        return self.added and not self.wanted
