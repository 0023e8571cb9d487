"""`python -m workshop NAME`: run a case of this folder; without a name, list them."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of all cases: modules that have a line `@case`."""
    modules = (path.relative_to(FOLDER) for path in FOLDER.rglob("*.py") if "\n@case(" in path.read_text())
    return sorted(".".join(path.with_suffix("").parts) for path in modules)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in names():
        print("python -m workshop NAME [OPTIONS], where NAME is one of", *names(), sep="\n  ")
        return 2
    return importlib.import_module(f"workshop.{sys.argv[1]}").main.run(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
