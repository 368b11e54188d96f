"""Measurements of the simulator, and the numbers that it starts from."""
