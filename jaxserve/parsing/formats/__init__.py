"""The formats in which models write tool calls, one module for each."""
