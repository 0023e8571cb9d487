"""Statistics of outputs, for usage objects."""

from typing import Any

from bough.engine.stats import RequestStats
from bough.session.requests import (
    TreeStep,
)


def speculation(*outputs: RequestStats) -> dict[str, Any]:
    """Return acceptance statistics over all outputs of a request."""
    steps = sum(stats.steps for stats in outputs)
    committed = sum(stats.step_tokens for stats in outputs)
    return {
        "acceptance_length": round(committed / steps, 4) if steps else 0.0,
        "steps": steps,
        "drafted_tokens": sum(stats.verified_rows - stats.steps for stats in outputs),
        "accepted_tokens": sum(sum(stats.accepted_by_position) for stats in outputs),
    }


def loops(*outputs: RequestStats) -> dict[str, Any]:
    """Return how often reasoning was ended because it repeated itself; empty if it never was."""
    count = sum(stats.reasoning_loops for stats in outputs)
    return {"reasoning_loops": count} if count else {}


def approximate(*outputs: RequestStats) -> dict[str, Any]:
    """Return the approximations used; empty if every output was computed exactly."""
    named = dict.fromkeys(each for stats in outputs for each in stats.approximate)
    return {"approximate": list(named)} if named else {}


def compression(*prompts: RequestStats) -> dict[str, Any]:
    """Return what compression did to the last of the prompts; empty where it was not asked for."""
    facts = prompts[-1].compression_dict() if prompts else {}
    return {"compression": facts} if facts else {}


def reused(*outputs: RequestStats) -> dict[str, Any]:
    """Return whether the cached prefix was computed while an answer was written; empty if not."""
    return {"cached_after_answer": True} if any(stats.cached_after_answer for stats in outputs) else {}


def statistics(stats: RequestStats) -> dict[str, Any]:
    return stats.as_dict() | {"tok_s": stats.decode_tok_s}


def timings(*request_stats: RequestStats) -> dict[str, Any]:
    """Return llama.cpp's timings object over all outputs of a request."""
    cached = sum(stats.cached_tokens for stats in request_stats)
    prompt = sum(stats.prompt_tokens for stats in request_stats) - cached
    prompt_ms = 1000 * sum(stats.ttft_s for stats in request_stats)
    predicted = sum(stats.generated_tokens for stats in request_stats)
    predicted_ms = 1000 * sum(stats.decode_s for stats in request_stats)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1000 * prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted if predicted else 0.0,
        "predicted_per_second": 1000 * predicted / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(stats.verified_rows - stats.steps for stats in request_stats),
        "draft_n_accepted": sum(sum(stats.accepted_by_position) for stats in request_stats),
    }


def tree(step: TreeStep) -> dict[str, Any]:
    return {
        "tokens": step.tokens,
        "parents": step.parents,
        "accepted": step.accepted,
        "draft_ms": round(step.draft_ms, 3),
        "step_ms": round(step.step_ms, 3),
    }
