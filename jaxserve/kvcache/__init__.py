"""Host bookkeeping of the paged KV cache: pages with reference counts, prefix cache, page tables. Imports no JAX."""

from jaxserve.kvcache.divided import DividedPool, joined_page, own_page
from jaxserve.kvcache.hashes import chain_hash, page_hashes
from jaxserve.kvcache.lanes import Lanes
from jaxserve.kvcache.pages import NULL_PAGE, PagePool, PagesInUse
from jaxserve.kvcache.sides import PageMove, Round, moves_to_sides
from jaxserve.kvcache.table import PageTable

__all__ = [
    "NULL_PAGE",
    "DividedPool",
    "Lanes",
    "PageMove",
    "PagePool",
    "PageTable",
    "PagesInUse",
    "Round",
    "chain_hash",
    "joined_page",
    "moves_to_sides",
    "own_page",
    "page_hashes",
]
