#!/usr/bin/env bash
# Continues training the embedded pair, in LIMIT seconds on one GPU; workshop/training/README.md, "Continuing".
#
#   OUT=FOLDER bash workshop/training/continue.sh             everything
#   OUT=FOLDER bash workshop/training/continue.sh target      only the target; then: draft
#
# Reads $WORK/text.jsonl.xz. If $WORK/benchmarks exists, text that overlaps with it is dropped, and the run
# stops before the draft if more than MOST of the target's outputs loop. In $OUT: target.gguf.00 and .01
# (cat them), draft-q8_0.gguf and the stages' records.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
WORK=${WORK:-workshop/training/work} OUT=${OUT:-$WORK/out} PARTS=${1:-target draft}
LIMIT=${LIMIT:-570} MINUTES=${MINUTES:-2.9} MOST=${MOST:-0.2}
PAIR=src/bough/pair
COMMIT=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
mkdir -p "$OUT" "$WORK"
exec > >(tee -a "$OUT/continue.log") 2>&1

# stage NAME SECONDS COMMAND...: runs the command with a time limit; SIGTERM first, so that it can save.
stage() {
  local name=$1 limit=$2 from=$SECONDS status=0
  shift 2
  echo "== $name, at $from s, at most $limit s: $*"
  timeout --kill-after 15 "$limit" "$@" || status=$?
  echo "== $name: $((SECONDS - from)) s, exit code $status"
  return $status
}

if [[ $PARTS == *target* ]]; then
  echo "commit $COMMIT, pair $(sha256sum $PAIR/target.gguf $PAIR/draft.gguf | cut -c1-16 | paste -sd ' ')"
  compared=()
  if [[ -d $WORK/benchmarks ]]; then compared=(--benchmarks "$WORK/benchmarks"); fi
  stage vocabulary 30 python -m workshop training.tokenizer --model $PAIR/target.gguf --work "$WORK"
  stage data 120 python -m workshop training.prepare --corpus "$WORK/text.jsonl.xz" --work "$WORK" --seed 2 \
    --budget-tokens 80000000 --instruct-tokens 0.35 --prompts 20000 "${compared[@]}"
  cp "$WORK/prepare.json" "$OUT"
  stage target $((LIMIT / 2)) python -m workshop training.pretrain --work "$WORK" --minutes "$MINUTES" --seq 768 \
    --lr 1.5e-3 --instruct-share 0.5 --seed 2 --continue-from $PAIR/target.gguf
  cp "$WORK/pretrain.json" "$OUT"
  stage file 60 python -c "from pathlib import Path; from bough.convert.convert import convert; \
print(convert(Path('$WORK/Bough-40M'), Path('$WORK/target.gguf'), mix='q4_k_m').bytes, 'bytes')"
  split -b 15M -d "$WORK/target.gguf" "$OUT/target.gguf."
  if [[ -d $WORK/benchmarks ]]; then
    stage loops 60 python -m workshop scores --suites humaneval --n-gen 256 --data "$WORK/benchmarks" \
      --model "$WORK/target.gguf" --out "$OUT/scores.jsonl" --most "$MOST" --texts "$OUT/loops.jsonl"
  fi
fi

if [[ $PARTS == *draft* ]]; then
  # Of the remaining time two fifths are for generation, the rest for training, evaluation and files.
  left=$((LIMIT - SECONDS))
  answering=$(python -c "print(max(0.5, 0.4 * $left / 60))")
  rm -rf "$WORK/draft"
  stage answers $((left / 2)) python -m workshop training.draft "$WORK/target.gguf" --prompts "$WORK/prompts.jsonl" \
    --output "$WORK/draft" --n-gen 256 --data-only --stop-after "$answering"
  left=$((LIMIT - SECONDS))
  training=$(python -c "print(min(4.0, max(0.5, ($left - 35) / 60)))")
  stage draft "$left" python -m workshop training.draft "$WORK/target.gguf" --tokens "$WORK/draft/tokens" \
    --output "$WORK/draft" --minutes "$training" --lr 1e-3 --gguf --continue-from $PAIR/draft.gguf
  cp "$WORK/draft/draft-q8_0.gguf" "$WORK/draft/training.json" "$OUT"
fi
echo "done after $SECONDS s"
