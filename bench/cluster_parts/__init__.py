"""The parts of `python -m bench.cluster` and `make demo-cluster`: the server, its load, and what is watched."""
