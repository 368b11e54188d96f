"""Execution of one instance's plan on devices: step inputs, the block table, sampling, compilation."""
