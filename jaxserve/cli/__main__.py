"""Run the command line by `python -m jaxserve.cli`."""

from jaxserve.cli.start import main

main()
