"""Writes docs/benchmarks.md from the last run of every benchmarks/results/bench-*.jsonl, with its pictures.

python benchmarks/make_page.py
"""

from pathlib import Path

from treeflash.bench import plots, report
from treeflash.bench.runner import LineFile

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "images" / "bench"
HEAD = """\
<!-- Written by benchmarks/make_page.py from benchmarks/results/bench-*.jsonl: measure again, do not edit. -->
# Benchmarks

Every table has the command that made it below it; the raw lines, a prompt and a way of decoding each, are in
`benchmarks/results/`. `treeflash bench` measures your own machine, and with `--url` any server, just so.

"""


def main() -> None:
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("bench-*.jsonl")):
        runs = LineFile(path).runs()
        if not runs:
            continue
        head, lines = runs[-1]
        drawn = plots.draw(lines, PICTURES / path.stem, title=report.subject(head))
        pictures = {name: str(file.relative_to(PAGE.parent)) for name, file in drawn.items()}
        parts.append(report.markdown(head, lines, pictures))
    PAGE.write_text(HEAD + report.DEFINITIONS + "\n" + "\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
