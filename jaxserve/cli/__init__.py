"""The command line: one module for each command, and how options become part of it."""
