"""What people see of commands and of the library: progress and tables, each in one style."""
