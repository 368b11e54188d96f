"""From a configuration to numbers, before any memory is taken: plan, step shapes, bytes, KV pages."""
