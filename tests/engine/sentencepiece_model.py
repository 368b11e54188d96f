"""A writer of small SentencePiece models, so that tests need neither the library nor a model file."""

import struct
from collections.abc import Sequence
from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
UNIGRAM, BPE = 1, 2


def write_model(
    file: Path,
    words: Sequence[str],
    *,
    algorithm: int = BPE,
    user_defined: Sequence[str] = (),
    dummy_prefix: bool = True,
    remove_extra_whitespaces: bool = False,
) -> None:
    """Write a model of <unk>, <s>, </s>, the user's pieces, all bytes, and `words` with falling scores."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(text, 0.0, USER_DEFINED) for text in user_defined]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(text, -1.0 - rank, NORMAL) for rank, text in enumerate(words)]
    data = b"".join(_bytes(1, _bytes(1, t.encode()) + _float(2, score) + _int(3, kind)) for t, score, kind in pieces)
    trainer = _int(3, algorithm) + _int(35, 1) + _int(40, 0) + _int(41, 1) + _int(42, 2) + _int(43, (1 << 64) - 1)
    normalizer = _bytes(1, b"identity") + _int(3, dummy_prefix) + _int(4, remove_extra_whitespaces) + _int(5, 1)
    file.write_bytes(data + _bytes(2, trainer) + _bytes(3, normalizer))


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
