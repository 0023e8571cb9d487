"""The share of a target's greedy outputs that loop: all prompts of a suite in one batch, plain decoding.

    python workshop/loops.py --data FOLDER --model FILE [--most 0.2]

Prints a JSON line: the shares of outputs that loop, that end with an end token, and of HumanEval heads that
the output copies verbatim. --texts FILE stores the outputs. Exits with 1 if more than --most loop.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from bough.bench.measure import loop_start
from bough.bench.suites import load
from bough.engine.sampler import SamplingParams
from bough.train.draft_data import encode_prompt
from bough.train.draft_target import load_target
from bough.train.generation import Asked, generate_batch, many_engine

FENCE = "```python\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--suite", default="humaneval")
    parser.add_argument("--prompts", type=int, default=164)
    parser.add_argument("--n-gen", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--most", type=float, default=1.0, help="largest share of outputs that may loop")
    parser.add_argument("--texts", type=Path, help="file for the outputs")
    options = parser.parse_args()
    target = load_target(options.model, device=options.device)
    prompts = load(options.suite, options.prompts, data=options.data)
    encoded = [encode_prompt({"messages": list(prompt.messages)}, target) for prompt in prompts]
    began = time.perf_counter()
    engine = many_engine(target.decoder, max_ctx=max(map(len, encoded)) + options.n_gen)
    asked = [Asked(ids, SamplingParams(seed=0)) for ids in encoded]
    stops = target.tokenizer.stop_ids
    found = generate_batch(engine, asked, max_tokens=options.n_gen, stop_ids=stops)
    outputs = {each.index: each.tokens for each in found}
    looping = [loop_start(outputs[number]) is not None for number in range(len(prompts))]
    texts = [target.tokenizer.decode(outputs[number]) for number in range(len(prompts))]
    copied = [
        head(prompt.messages[-1]["content"]) in text for prompt, text in zip(prompts, texts, strict=True)
    ]
    share = sum(looping) / len(prompts)
    print(
        json.dumps(
            {
                "model": options.model.name,
                "suite": options.suite,
                "prompts": len(prompts),
                "loop": round(share, 3),
                "end": round(
                    sum(len(output) < options.n_gen for output in outputs.values()) / len(prompts), 3
                ),
                "copied": round(sum(copied) / len(prompts), 3) if options.suite == "humaneval" else None,
                "tokens": sum(map(len, outputs.values())),
                "seconds": round(time.perf_counter() - began, 1),
            }
        ),
        flush=True,
    )
    if options.texts is not None:
        with options.texts.open("w", encoding="utf-8") as file:
            for prompt, text, loops in zip(prompts, texts, looping, strict=True):
                file.write(json.dumps({"prompt": prompt.name, "loops": loops, "text": text}) + "\n")
    sys.exit(1 if share > options.most else 0)


def head(request: str) -> str:
    """Return the content of the request's code block."""
    return request.partition(FENCE)[2].removesuffix("\n```").strip()


if __name__ == "__main__":
    main()
