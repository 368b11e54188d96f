"""The tokenizer: a model's vocabulary with its chat templates, and the text of its tokens, whole and token by token."""

import codecs
import logging
from collections.abc import Mapping, Sequence, Set as AbstractSet
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from jaxserve.core.errors import CheckpointError, RequestError
from jaxserve.core.keywords import MAX_NAME, explains_keywords, missing_attribute, translate
from jaxserve.core.plain_values import plain
from jaxserve.core.request import Detokenizer
from jaxserve.engine.chat_messages import Message
from jaxserve.engine.chat_template import PLAIN, ChatTemplate
from jaxserve.engine.detokenizer import ByteDetokenizer, StreamDetokenizer, is_continuation
from jaxserve.engine.token_ids import as_token_ids
from jaxserve.engine.tokenizer_files import SPECIAL_NAMES, TokenizerFiles, choose_template, vocabulary_file
from jaxserve.engine.transformers_names import ATTRIBUTES, CALL, CHAT_PARAMETERS, CONVERSATION, DECODE, TEMPLATE
from jaxserve.engine.vocabulary import Vocabulary

log = logging.getLogger(__name__)

TOOL_USE = "tool_use"  # the name of the template that some models have for conversations with tools
MAX_UNFINISHED = 8  # tokens at the end of a prompt in which the beginning of a character may be


class Encoding(dict[str, Any]):
    """Encoded texts as Transformers returns them: `input_ids` and `attention_mask`, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"an encoding has {' and '.join(self)}, not {name!r}", name=name, obj=self)


class Tokenizer(Vocabulary):
    """A thread-safe conversion of text to token ids and back, and of conversations to text.

    Methods and attributes of Transformers' tokenizers exist as far as they mean the same here. Unlike there, `decode`
    leaves out special tokens by default, and `apply_chat_template` by default returns text that ends with the beginning
    of an answer. Any other name raises an `AttributeError` that says what to use.
    """

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
        super().__init__(tokenizer, special_tokens or {}, eos_token_ids, add_bos, add_eos)
        self.has_chat_template = chat_template is not None and builtin_template is None
        self.builtin_template = builtin_template if chat_template is not None else "plain"
        special = dict(self.special_tokens_map)
        if not self.has_chat_template and not self._bos.wanted:
            special.pop("bos_token", None)
        self._template_tokens = special
        self._chat_template = ChatTemplate(chat_template or PLAIN, special)
        self._report_unread = lru_cache(maxsize=64)(_report_unread)
        self._other_template = lru_cache(maxsize=8)(self._compile)
        self._tool_template = self._chat_template if tool_template is None else ChatTemplate(tool_template, special)

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

    @explains_keywords(CALL, "the tokenizer")
    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """Return the `input_ids` and the `attention_mask` of a text, or those of several texts as lists.

        Raise `RequestError` as `encode`.
        """
        if isinstance(text, list | tuple):
            ids: Any = [self.encode(each, add_special_tokens) for each in text]
            return Encoding(input_ids=ids, attention_mask=[[1] * len(each) for each in ids])
        ids = self.encode(text, add_special_tokens)  # type: ignore[arg-type]
        return Encoding(input_ids=ids, attention_mask=[1] * len(ids))

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text as the vocabulary writes them. Raise `RequestError` as `encode`."""
        return [str(self.written(token)) for token in self.encode(text, add_special_tokens=False)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token as the vocabulary writes it, or of several as a list.

        A token that does not exist has the id of the unknown token, None if there is none.
        """
        if isinstance(tokens, str):
            known = self.token_id(tokens)
            return self._id_of("unk_token") if known is None else known
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Return a token as the vocabulary writes it, or several as a list. An id that no token has gives None."""
        single, token_ids = _token_ids(ids)
        if single:
            return self.written(token_ids[0])
        hidden = self.special_ids if skip_special_tokens else ()
        return [self.written(token) for token in token_ids if token not in hidden]

    @explains_keywords(DECODE, "the tokenizer's decode")
    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids that begin a text, with U+FFFD for bytes that are no whole character.

        Ids that no token has are ignored. Raise `RequestError` for what is no token id.
        """
        _, ids = _token_ids(token_ids)
        stream = self.stream(skip_special_tokens, start=True)
        text = stream.push([token for token in ids if token < self._end])
        return text + stream.flush()

    @explains_keywords(DECODE, "the tokenizer's batch_decode")
    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each of several series of token ids, as `decode`."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def stream(
        self, skip_special_tokens: bool = True, *, start: bool = False, after: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a new incremental detokenizer, whose pieces are together the text of `decode`.

        `start`: the tokens begin a text, so that the space that sentencepiece puts before it is dropped as in `decode`.
        Otherwise they continue a prompt, and the space stays. `after`: the tokens before. If they end inside a
        character that the new tokens complete, it is part of the text.
        """
        if self._bytes is None:
            return StreamDetokenizer(partial(self._decode, skip_special_tokens=skip_special_tokens))
        visible = self._visible_bytes if skip_special_tokens else self.token_bytes
        begun = _unfinished(b"".join(map(visible, after[-MAX_UNFINISHED:])))
        return ByteDetokenizer(visible, strip=self._bytes.stripped if start else 0, begun=begun)

    def ends_inside_character(self, token_ids: Sequence[int], following: Sequence[int]) -> bool:
        """Return whether a text of tokens ends inside a character that the following tokens go on with."""
        if self._bytes is None or not _unfinished(b"".join(map(self._visible_bytes, token_ids[-MAX_UNFINISHED:]))):
            return False
        data = b"".join(map(self._visible_bytes, following[:MAX_UNFINISHED]))
        return is_continuation(data)

    @explains_keywords(CONVERSATION, "the tokenizer's apply_chat_template")
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **variables: Any,
    ) -> Any:
        """Return the prompt of a conversation: its text or, with `tokenize`, its token ids.

        The template writes the special tokens: encode its text without them. The other arguments are those of
        `conversation_text`, which raises the same errors.
        """
        text = self.conversation_text(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def conversation_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        optional: AbstractSet[str] = frozenset(),
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation as `ChatTemplate.render`. Encode it without special tokens.

        `chat_template`: a template, the name of a built-in one or a file, used instead of the model's.
        `optional`: variables that are left out, and logged, if the template does not read them. Raise `UnknownKeyword`
        for any other that it does not read, and `RequestError` if it refuses the messages.
        """
        if chat_template is None:
            template, known = self._tool_template if tools else self._chat_template, self.template_variables
        else:
            template = self._other_template(chat_template)
            known = template.variables
        for name in optional & variables.keys() - known:
            self._report_unread(name)
            del variables[name]
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **translate("the chat template", variables, known, TEMPLATE, hints=CHAT_PARAMETERS),
        )

    @property
    def all_special_ids(self) -> list[int]:
        """The sorted ids of all special tokens."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens, in the order of their ids."""
        return list(self.special_tokens)

    def __repr__(self) -> str:
        special = ", ".join(f"{name} {text!r}" for name, text in sorted(self.special_tokens_map.items()))
        template = "its own" if self.has_chat_template else f"the built-in {self.builtin_template!r}"
        parts = [f"tokens: {self.vocab_size:,}", *([special] if special else []), f"chat template: {template}"]
        return f"<Tokenizer, {', '.join(parts)}>"

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the model's chat templates read, besides those of the parameters of `apply_chat_template`."""
        return self._chat_template.variables | self._tool_template.variables

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
            self.conversation_text([{"role": role, "content": role} for role in roles])
        except RequestError:
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        """Return a special token or its id, None if there is none. Raise `AttributeError` that says what to use."""
        token = name.removesuffix("_id")
        if token in SPECIAL_NAMES and "special_tokens_map" in self.__dict__:
            return self._id_of(token) if name != token else self.special_tokens_map.get(token)
        raise missing_attribute(self, name, ATTRIBUTES)

    def _compile(self, given: str) -> ChatTemplate:
        source, _ = choose_template(given, {}, Path())
        return ChatTemplate(source, self._template_tokens)


def _token_ids(value: Any) -> tuple[bool, tuple[int, ...]]:
    """Return whether a value is a single token id, and the ids that it is. Raise `RequestError` for any other value."""
    value = plain(value)
    single = isinstance(value, int) and not isinstance(value, bool)
    try:
        ids = as_token_ids((value,) if single else value)
    except TypeError as error:
        message = f"token_ids is {repr(value)[:MAX_NAME]}: it must be a token id or a list of them ({error})"
        raise RequestError(message, field="token_ids", value=value) from error
    if ids and min(ids) < 0:
        raise RequestError(f"token_ids has {min(ids)}: token ids are integers of at least 0", field="token_ids")
    return single, ids


def _unfinished(data: bytes) -> bytes:
    """Return the bytes of a character with which a text ends that is not complete, b"" if there is none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _report_unread(name: str) -> None:
    log.info("the model's chat template does not read %r, which some requests set: it is ignored", name[:MAX_NAME])
