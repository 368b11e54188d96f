"""Models by their names on Hugging Face's hub: the local cache first, and downloads of what it lacks.

The cache is that of the hub's own client (`huggingface_hub`), so that both use the same files. The client itself is
imported only for a download: a model in the cache costs no request, and no slow import.
"""

from jaxserve.hub.fetch import fetch
from jaxserve.hub.names import HubName, hub_name
from jaxserve.hub.selection import Need

__all__ = ["HubName", "Need", "fetch", "hub_name"]
