"""Measurements. Each script says what it measures and how, and prints a table; nothing here asserts a time."""
