"""What the engine does by itself, without HTTP: `jaxserve bench throughput`, `latency` and `startup`.

Each measurement takes an options object and yields rows: flat dicts of numbers and names, ready for a table and for
JSON. A row is yielded as soon as it is measured, so that an interrupted run keeps the rows before it. `options`
imports no JAX; the other modules do, and so are imported when they are needed.
"""
