"""Files of requests, which `jaxserve run-batch` answers without a server."""
