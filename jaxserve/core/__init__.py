"""The vocabulary: requests, sampling, configurations, errors, clocks, protocols. Imports nothing of ours and no JAX."""
