"""The engine without HTTP: `jaxserve bench throughput`, `latency` and `startup`.

Each measurement takes an options object and yields rows: flat dicts of numbers and names, ready for a table and for
JSON. A row is yielded as soon as it is measured, so that an interrupted run keeps the rows before it. `options` does
not import JAX. The other modules do, and so they are imported only when needed.
"""
