"""Conversion of SentencePiece models (tokenizer.model) to tokenizers of the `tokenizers` library.

SentencePiece itself is not needed. The file is a protocol buffer (sentencepiece_model.proto in google/sentencepiece).
Only a few fields are read: pieces with their scores and kinds, the algorithm, and the normalization of text.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxserve.core.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of pieces
UNIGRAM, BPE = 1, 2  # algorithms
SPACE = "\u2581"


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The contents of a tokenizer.model. An id is None if the model has no such token."""

    pieces: tuple[Piece, ...]
    algorithm: int
    bos_id: int | None
    eos_id: int | None
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    @classmethod
    def load(cls, file: Path) -> "SentencePieceModel":
        """Read a file. Raise `CheckpointError` unless it is a SentencePiece model of type BPE or Unigram."""
        try:
            fields = dict(_grouped(file.read_bytes()))
            pieces = tuple(_piece(dict(_fields(data))) for data in fields[1])
            trainer, normalizer = (dict(_fields(fields.get(number, [b""])[-1])) for number in (2, 3))
        except (OSError, KeyError, IndexError, ValueError, TypeError, struct.error) as error:
            raise CheckpointError(
                f"{file} is not a SentencePiece model: use a tokenizer.json instead (transformers'"
                " AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            ) from error
        algorithm = trainer.get(3, UNIGRAM)
        if algorithm not in (UNIGRAM, BPE):
            raise CheckpointError(
                f"{file} has the algorithm {algorithm!r}: only Unigram ({UNIGRAM}) and BPE ({BPE}) are supported"
            )

        def token(number: int, default: int) -> int | None:
            found = trainer.get(number, default)
            return found if isinstance(found, int) and found < len(pieces) else None  # -1 is stored as a large number

        return cls(
            pieces,
            algorithm,
            bos_id=token(41, 1),
            eos_id=token(42, 2),
            charsmap=bytes(normalizer.get(2, b"")),
            add_dummy_prefix=bool(normalizer.get(3, True)),
            remove_extra_whitespaces=bool(normalizer.get(4, True)),
            escape_whitespaces=bool(normalizer.get(5, True)),
        )

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the bos, eos and unknown tokens that exist, by name."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self._unknown()}
        return {name: self.pieces[id].text for name, id in ids.items() if id is not None}

    def tokenizer(self, *, legacy: bool = True) -> Tokenizer:
        """Return a tokenizer that encodes like SentencePiece, and also recognizes control tokens in a text.

        `legacy`: a leading space is added after each control token, not only at the beginning of a text.
        """
        tokenizer = Tokenizer(self._unigram() if self.algorithm == UNIGRAM else self._bpe())
        tokenizer.normalizer = normalizers.Sequence(self._normalizers(legacy))
        if steps := self._pre_tokenizers(legacy):
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        strip = [decoders.Strip(" ", 1, 0)] if self.add_dummy_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        special = [piece.text for piece in self.pieces if piece.kind in (UNKNOWN, CONTROL)]
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        return tokenizer

    def _unknown(self) -> int | None:
        return next((id for id, piece in enumerate(self.pieces) if piece.kind == UNKNOWN), None)

    def _has_bytes(self) -> bool:
        return any(piece.text == "<0x00>" for piece in self.pieces)

    def _user_defined(self) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == USER_DEFINED]

    def _unigram(self) -> models.Unigram:
        vocab = [(piece.text, piece.score) for piece in self.pieces]
        return models.Unigram(vocab, self._unknown(), byte_fallback=self._has_bytes())

    def _bpe(self) -> models.BPE:
        unknown = self._unknown()
        return models.BPE(
            {piece.text: id for id, piece in enumerate(self.pieces)},
            self._merges(),
            unk_token=None if unknown is None else self.pieces[unknown].text,
            fuse_unk=True,
            byte_fallback=self._has_bytes(),
            ignore_merges=bool(self._user_defined()),  # no merge makes user-defined pieces
        )

    def _merges(self) -> list[tuple[str, str]]:
        """Return the merges that produce the pieces, the highest score first."""
        normal = {piece.text: (-piece.score, id) for id, piece in enumerate(self.pieces) if piece.kind == NORMAL}
        ranked = [
            (rank, text[:cut], text[cut:])
            for text, rank in normal.items()
            for cut in range(1, len(text))
            if text[:cut] in normal and text[cut:] in normal
        ]
        return [(left, right) for _, left, right in sorted(ranked)]

    def _normalizers(self, legacy: bool) -> list[normalizers.Normalizer]:
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.add_dummy_prefix and legacy:
            steps.append(normalizers.Prepend(SPACE))
        if self.escape_whitespaces:
            steps.append(normalizers.Replace(" ", SPACE))
        return steps

    def _pre_tokenizers(self, legacy: bool) -> list[pre_tokenizers.PreTokenizer]:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.add_dummy_prefix and not legacy:
            steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
        if texts := self._user_defined():
            pattern = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
        return steps


def _piece(fields: dict[int, int | bytes]) -> Piece:
    text, score = fields.get(1, b""), fields.get(2, bytes(4))
    assert isinstance(text, bytes)
    assert isinstance(score, bytes)
    kind = fields.get(3, NORMAL)
    assert isinstance(kind, int)
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


def _grouped(data: bytes) -> dict[int, list[bytes]]:
    """Return the nested messages of a protocol buffer message by their field number. Raise ValueError for others."""
    groups: dict[int, list[bytes]] = {}
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            raise ValueError(f"field {number} is not a message")
        groups.setdefault(number, []).append(value)
    return groups


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer message by number: integers, or the bytes of any other type."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while position < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or (varint() if kind == 2 else None)
        if size is None or position + size > len(data):
            raise ValueError(f"field {number} has the wire type {kind} or is cut off")
        yield number, data[position : position + size]
        position += size
