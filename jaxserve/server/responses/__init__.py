"""The Responses API: items and events of an answer, and the responses that are kept for later requests."""
