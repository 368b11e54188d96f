"""The engine: its core, the loops that drive it, tokenizer, chat templates, request limits and the step log."""
