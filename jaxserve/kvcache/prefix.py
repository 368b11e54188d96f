"""Hashes that name the contents of full pages: a chain over tokens, started by a salt.

Equal hashes mean equal tokens in all pages up to this one, for the same tenant and the same precision of weights.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_DIGEST = 16  # bytes: a collision needs about 2**64 pages


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a page holding `tokens` behind the page named `parent` (or behind the salt)."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=_DIGEST).digest()


def page_hashes(tokens: Sequence[int], page_size: int, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of all full pages of `tokens`; `known` are the hashes of the first pages, not computed again."""
    hashes = list(known)
    parent = hashes[-1] if hashes else chain_hash(salt.encode(), ())
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        parent = chain_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
    return hashes
