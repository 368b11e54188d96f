"""Hashes of full pages, over their tokens and all tokens before them, by which the prefix cache finds pages."""

import hashlib
from collections.abc import Sequence

import numpy as np

_DIGEST_BYTES = 16  # so that a collision is likely only among about 2**64 pages


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a page with `tokens`, given the hash `parent` of the page before it (or of the salt)."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=_DIGEST_BYTES).digest()


def page_hashes(tokens: Sequence[int], page_size: int, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the hashes of all full pages of `tokens`. `known`: the hashes of the first pages, which are reused."""
    hashes = list(known)
    parent = hashes[-1] if hashes else chain_hash(salt.encode(), ())
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        parent = chain_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
    return hashes
