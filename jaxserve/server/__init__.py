"""The OpenAI-compatible HTTP server.

It uses an engine only through `engine.client.EngineClient` and imports no JAX.
"""
