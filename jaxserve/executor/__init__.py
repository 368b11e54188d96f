"""Execution of one instance's plan on devices: step inputs, loaded blocks, KV pools, compilation, fused stages."""
