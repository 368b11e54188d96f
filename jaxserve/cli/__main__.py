"""Run the command line by `python -m jaxserve.cli`."""

from jaxserve.cli.main import main

main()
