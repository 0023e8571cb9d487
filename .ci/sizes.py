"""Lowers the limits of lines by package, in .ci/sizes.toml, to what there is; --raise writes larger ones."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / ".ci" / "sizes.toml"
SUFFIXES = {".py", ".c", ".cu", ".cuh", ".h"}
ROOMS = ("workshop",)  # beside the package
ROW = re.compile(r"^(?P<name>\w+) = \{ limit = (?P<limit>\d+)", re.MULTILINE)


def lines(name: str) -> int:
    """Return the lines of a package."""
    folder = ROOT / name if name in ROOMS else ROOT / "src" / "bough" / name
    files = [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
    return sum(len(path.read_bytes().splitlines()) for path in files)


def main() -> None:
    may_grow = "--raise" in sys.argv[1:]

    def row(match: re.Match[str]) -> str:
        limit, now = int(match["limit"]), lines(match["name"])
        return f"{match['name']} = {{ limit = {now if now < limit or may_grow else limit}"

    FILE.write_text(ROW.sub(row, FILE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
