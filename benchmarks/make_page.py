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
_GROWN = """\
The model is the 40M pair grown to the 27B's shapes and types (`treeflash grow`): its text and what is
accepted of its draft are the small pair's, its times those of a 27B. It answers like a 40M model, as the
scores say.
"""
_TEN = """\
The ten prompts of each suite that `--prompts 10` takes: every fifth of the run of 50 below.
"""
_QUOTED = """\
For comparison, measured elsewhere on such a card with a synthetic file of these shapes and types: llama.cpp
(August 2026) 80.4 tok/s plain (12.4 ms a token) and 35.6 ms, 2.87 plain steps, for a whole step of its
`draft-dflash` with 16 rows; Luce DFlash (May 2026) 18.9 ms a token and 72.6 ms, 3.8 plain steps, for a tree
step of 23 rows. Nothing was accepted there, so these are times of steps, not speeds of answers.
"""
_PARTED = """\
One of 150 greedy answers and two of 150 drawn ones differ from the plain ones. Where the greedy one parts,
behind 149 tokens of humaneval/127, the two likeliest tokens are 0.009 nats apart.
"""
NOTES = {
    "bench-27b-h200-10": "\n".join((_GROWN, _TEN, _QUOTED)),
    "bench-27b-h200-50": _PARTED,
}


def main() -> None:
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("bench-*.jsonl")):
        runs = LineFile(path).runs()
        if not runs:
            continue
        head, lines = runs[-1]
        drawn = plots.draw(lines, PICTURES / path.stem, title=report.subject(head))
        pictures = {name: str(file.relative_to(PAGE.parent)) for name, file in drawn.items()}
        parts.append(report.markdown(head, lines, pictures, notes=NOTES.get(path.stem, "")))
    PAGE.write_text(HEAD + report.DEFINITIONS + "\n" + "\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
