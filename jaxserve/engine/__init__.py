"""The engine: the pure core, the loop that drives it, and its asynchronous front."""
