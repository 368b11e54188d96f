"""Host bookkeeping of the paged KV cache: pages with reference counts, prefix cache, page tables. Imports no JAX."""

from jaxserve.kvcache.divided import DividedPool
from jaxserve.kvcache.hashes import chain_hash, page_hashes
from jaxserve.kvcache.joined_ids import JoinedIds
from jaxserve.kvcache.lanes import Lanes
from jaxserve.kvcache.pages import NULL_PAGE, PagePool, PagesInUse
from jaxserve.kvcache.sides import PageMove, Round, moves_to_sides
from jaxserve.kvcache.table import PageTable

__all__ = [
    "NULL_PAGE",
    "DividedPool",
    "JoinedIds",
    "Lanes",
    "PageMove",
    "PagePool",
    "PageTable",
    "PagesInUse",
    "Round",
    "chain_hash",
    "moves_to_sides",
    "page_hashes",
]
