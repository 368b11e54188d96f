"""`python -m jaxserve.cli` is the command line."""

from jaxserve.cli.main import main

main()
