"""Anthropic's Messages API: content blocks and events of an answer, and its form of errors."""
