"""The command line as `python -m jaxserve`."""

from jaxserve.cli.start import main

if __name__ == "__main__":
    main()
