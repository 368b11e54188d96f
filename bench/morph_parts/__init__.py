"""The parts of `python -m bench.morph` and `make demo`: systems, traffic, measuring, quality, tables and plots."""
