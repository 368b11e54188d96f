"""Measurements of the simulator, and the fit of its hardware figures."""
