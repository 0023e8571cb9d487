"""`python -m bough`: the same as `bough`."""

from bough.cli.main import main

if __name__ == "__main__":
    main()
