"""Progress and tables, which all commands and the library show in one style."""
