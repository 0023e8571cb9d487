"""`python -m treeflash`: the same as `treeflash`."""

from treeflash.cli.main import main

if __name__ == "__main__":
    main()
