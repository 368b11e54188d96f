"""The tokenizer's files in a model's folder, read as Transformers reads them.

The files are tokenizer.json (or tokenizer.model), tokenizer_config.json, special_tokens_map.json, added_tokens.json,
chat_template.jinja, additional_chat_templates/ and generation_config.json. If two files contradict each other, a
warning says which one is used.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as HfTokenizer

from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.core.files import is_lfs_pointer, lfs_error, read_json_object, read_text, token_ids
from jaxserve.core.model_name import model_name
from jaxserve.engine.chat_template import BUILTIN_TEMPLATES
from jaxserve.engine.sentencepiece import SentencePieceModel

log = logging.getLogger(__name__)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The supported vocabularies, the preferred one first, and the names of unsupported ones.
FILES = ("tokenizer.json", "tokenizer.model")
OTHERS = ("tekken.json", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model.v3", "qwen.tiktoken")
ADVICE = (
    "with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...) writes a tokenizer.json if it can"
    " read the model's own files"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """A vocabulary with its added tokens, and the settings of the remaining files."""

    tokenizer: HfTokenizer
    special_tokens: Mapping[str, str]
    add_bos: bool | None  # None: as the vocabulary's file says
    add_eos: bool | None  # None: as the vocabulary's file says
    eos_token_ids: tuple[int, ...]  # from generation_config.json
    chat_templates: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> "TokenizerFiles":
        """Read a model's folder, or one vocabulary file. Raise `CheckpointError` naming the file that is at fault."""
        file = vocabulary_file(path)
        folder = file.parent
        with file.open("rb") as opened:
            if is_lfs_pointer(opened.read(64)):
                raise lfs_error(file)
        config = read_json_object(folder / "tokenizer_config.json", missing_ok=True)
        special = _special_tokens(config, read_json_object(folder / "special_tokens_map.json", missing_ok=True))
        add_bos, add_eos = (_flag(config, name, folder) for name in ("add_bos_token", "add_eos_token"))
        if file.suffix == ".model":
            model = SentencePieceModel.load(file)
            tokenizer = model.tokenizer(legacy=config.get("legacy") is not False)
            special = {**model.special_tokens(), **special}
            add_bos = add_bos if add_bos is not None else model.bos_id is not None  # as LlamaTokenizer does
        else:
            try:
                tokenizer = HfTokenizer.from_file(str(file))
            except Exception as error:  # the library raises a bare Exception
                raise CheckpointError(f"{file} is not a valid tokenizer: {error}") from error
        _add_tokens(tokenizer, folder, config, special)
        generation_path = folder / "generation_config.json"
        try:
            eos = token_ids(read_json_object(generation_path, missing_ok=True).get("eos_token_id"))
        except CheckpointError as error:
            raise CheckpointError(f"{generation_path}: {error}") from error
        return cls(
            tokenizer,
            special,
            add_bos,
            add_eos,
            eos,
            _chat_templates(folder, config),
        )


def vocabulary_file(path: Path) -> Path:
    """Return the file with the vocabulary. Raise `CheckpointError` if the folder has no supported file."""
    if not path.is_dir():
        if path.is_file():
            return path
        raise CheckpointError(f"{path} does not exist: a tokenizer is a folder, a tokenizer.json or a tokenizer.model")
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(missing_vocabulary(path))


def missing_vocabulary(folder: Path) -> str:
    """Return the error message for a folder without a supported vocabulary."""
    others = ", ".join(name for name in OTHERS if (folder / name).is_file())
    found = f"; {others} cannot be read: {ADVICE}" if others else ""
    return f"{folder} has no {' or '.join(FILES)}{found}"


def has_vocabulary(folder: Path) -> bool:
    """Return whether a model's folder has a supported vocabulary."""
    return any((folder / name).is_file() for name in FILES)


def choose_template(given: str | None, own: Mapping[str, str], folder: Path) -> tuple[str, str | None]:
    """Return a chat template, and its name if it is a built-in one.

    `given`: the name of one of the model's `own` templates, the name of a built-in one, a file, or the template itself.
    None means the model's own `default`. For a model without it, None means the built-in template `vicuna` if the name
    of the model contains that word, and `plain` otherwise. Raise `ConfigError` for any other value.
    """
    if given is None:
        if "default" in own:
            return own["default"], None
        given = "vicuna" if _is_vicuna(folder) else "plain"
    elif given in own:
        return own[given], None
    if given in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[given], given
    try:
        if Path(given).is_file():
            return Path(given).read_text(encoding="utf-8"), None
    except (OSError, ValueError) as error:
        # Also raised for a template that is too long for a file's name, and for a file that is not UTF-8.
        if "{" not in given:
            raise ConfigError(f"the chat template {given!r} cannot be read: {error} (--chat-template)") from error
    if "{" in given:
        return given, None
    names = ", ".join({**BUILTIN_TEMPLATES, **own})
    raise ConfigError(f"unknown chat template {given!r}: give a file or one of {names} (--chat-template)")


def _is_vicuna(folder: Path) -> bool:
    # Vicuna's repositories have no template, and only their name identifies them.
    names = (model_name(folder), read_json_object(folder / "config.json", missing_ok=True).get("_name_or_path"))
    return any(isinstance(name, str) and "vicuna" in name.lower() for name in names)


def _flag(config: Mapping[str, Any], name: str, folder: Path) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {name} is {value!r}: it must be true or false")
    return value


def _special_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name. `legacy`: the contents of special_tokens_map.json, the older file.

    As in Transformers, `legacy` takes precedence unless tokenizer_config.json lists the added tokens.
    """
    given, older = ({name: _text(source.get(name)) for name in SPECIAL_NAMES} for source in (config, legacy))
    preferred, other = (given, older) if "added_tokens_decoder" in config else (older, given)
    for name in ("bos_token", "eos_token"):
        if given[name] and older[name] and given[name] != older[name]:
            log.warning(
                "%s is %r in tokenizer_config.json and %r in special_tokens_map.json: %r is used",
                name,
                given[name],
                older[name],
                preferred[name],
            )
    return {name: text for name in SPECIAL_NAMES if (text := preferred[name] or other[name])}


def _text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _add_tokens(tokenizer: HfTokenizer, folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens of other files that `tokenizer` lacks, if the ids that those files give them are free."""
    declared = _declared_tokens(folder, config, special)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    taken = set(tokenizer.get_vocab().values())
    # The id that the library gives to the next token: it counts the tokens, so it may be taken if ids are skipped.
    following = max([tokenizer.get_vocab_size(False), *(id + 1 for id in tokenizer.get_added_tokens_decoder())])
    new, misplaced = [], []
    for id, token in sorted(declared.items()):
        found = tokenizer.token_to_id(token.content)
        if found is None and id == following and id not in taken:
            following += 1
        elif found != id:
            misplaced.append(f"{token.content!r} ({id}, not {following if found is None else found})")
            continue
        if token.content not in known:
            new.append(token)
    if misplaced:
        log.warning(
            "%s: %d tokens cannot have the ids that tokenizer_config.json or added_tokens.json gives them, and are left"
            " unchanged: %s",
            folder,
            len(misplaced),
            ", ".join(misplaced[:5]),
        )
    known |= {token.content for token in new}
    for text in {*special.values(), *_additional(config)} - known:
        if tokenizer.token_to_id(text) is not None:  # otherwise a special token would be split into pieces
            new.append(AddedToken(text, special=True, normalized=False))
    if new:
        tokenizer.add_tokens(new)
    for name in ("bos_token", "eos_token"):
        if name in special and tokenizer.token_to_id(special[name]) is None:
            log.warning(
                "%s: the %s is %r, which is not in the vocabulary, so it has no effect", folder, name, special[name]
            )


def _declared_tokens(folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> dict[int, AddedToken]:
    """Return the added tokens by id, from tokenizer_config.json or else from added_tokens.json."""
    listed = config.get("added_tokens_decoder")
    file = folder / ("tokenizer_config.json" if listed is not None else "added_tokens.json")
    try:
        if listed is not None:
            options = ("single_word", "lstrip", "rstrip", "normalized", "special")
            return {
                int(id): AddedToken(
                    str(token["content"]), **{name: bool(token[name]) for name in options & token.keys()}
                )
                for id, token in dict(listed).items()
            }
        texts = {*special.values(), *_additional(config)}
        return {
            int(id): AddedToken(text, special=text in texts, normalized=text not in texts)
            for text, id in read_json_object(file, missing_ok=True).items()
        }
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: its added tokens are malformed ({error})") from error


def _additional(config: Mapping[str, Any]) -> list[str]:
    """Return the texts of the special tokens without a name."""
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    values = listed.values() if isinstance(listed, dict) else listed
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise CheckpointError(f"tokenizer_config.json: its special tokens are {values!r}, they must be a list of texts")
    return [text for value in values if (text := _text(value))]


def _template_text(file: Path) -> str:
    try:
        text = read_text(file)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if is_lfs_pointer(text.encode()):
        raise lfs_error(file)
    return text


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's chat templates by name. The main one is `default`."""
    given = config.get("chat_template")
    try:
        if isinstance(given, list):
            templates = {entry["name"]: entry["template"] for entry in given}
        else:
            templates = dict(given) if isinstance(given, dict) else {} if given is None else {"default": given}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TypeError("a template is not a text")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named ones ({error})"
        ) from error
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = _template_text(file)
    file = folder / "chat_template.jinja"
    if file.is_file():
        text = _template_text(file)
        if templates.get("default", text).strip() != text.strip():
            log.warning("%s: chat_template.jinja is used, tokenizer_config.json has another chat_template", folder)
        templates["default"] = text
    return templates
