"""Planning of an engine before any memory is taken: its plan, step shapes, bytes and number of KV pages."""
