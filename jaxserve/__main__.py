"""`python -m jaxserve`: the command line."""

from jaxserve.cli.main import main

if __name__ == "__main__":
    main()
