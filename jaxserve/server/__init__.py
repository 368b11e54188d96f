"""The OpenAI-compatible HTTP server. Sees an engine only through `engine.client.EngineClient`; imports no JAX."""
