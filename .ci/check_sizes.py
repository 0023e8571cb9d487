"""Prints the size of every part and fails on a source file that outgrew its limit."""

import sys
from collections import Counter
from pathlib import Path

LIMIT, KERNEL_LIMIT = 400, 500


def main() -> int:
    root = Path(__file__).parent.parent / "src" / "treeflash"
    parts: Counter[str] = Counter()
    too_long = []
    for path in sorted(root.rglob("*.py")):
        lines = len(path.read_text().splitlines())
        relative = path.relative_to(root)
        parts[relative.parts[0]] += lines
        if lines > (KERNEL_LIMIT if relative.parts[0] == "kernels" else LIMIT):
            too_long.append(f"{relative}: {lines} lines")
    for part, lines in sorted(parts.items()):
        print(f"{lines:6d}  {part}")
    print(f"{parts.total():6d}  in all")
    for line in too_long:
        print(f"over the limit of {LIMIT} ({KERNEL_LIMIT} for kernels): {line}", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
