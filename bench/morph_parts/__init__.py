"""The parts of `python -m bench.morph` and `make demo`: systems, traffic, measurement, quality, tables and plots."""
