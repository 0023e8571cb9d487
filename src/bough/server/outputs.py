"""Statistics of outputs, for usage objects."""

from collections.abc import Sequence
from typing import Any

from bough.engine.sampler import TokenLogprob
from bough.engine.stats import RequestStats
from bough.session.events import TreeStep
from bough.text.tokenizer import Tokenizer

_LOOPS = ("reasoning_loops", "answer_loops", "avoided_sentences")
LEAST_LOGPROB = -9999.0  # JSON has no infinities


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


def notes(*outputs: RequestStats, copies: int = 1) -> dict[str, Any]:
    """Return what usage objects say where there is something to say; each prompt has `copies` outputs."""
    named = dict.fromkeys(name for stats in outputs for name in stats.approximate)
    facts = {
        **{name: sum(getattr(stats, name) for stats in outputs) for name in _LOOPS},
        "approximate": list(named),  # what was not computed exactly
        "cached_after_answer": any(stats.cached_after_answer for stats in outputs),
        "compression": outputs[::copies][-1].compression_dict() if outputs else {},
        # Of the first choice, which encodes them.
        "images": outputs[0].images_dict() if outputs and outputs[0].images else {},
    }
    return {name: value for name, value in facts.items() if value}


def statistics(stats: RequestStats) -> dict[str, Any]:
    return stats.as_dict() | {"tok_s": stats.decode_tok_s}


def timings(*request_stats: RequestStats) -> dict[str, Any]:
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


def logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(id)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}

    return [
        entry(token.token, token.logprob) | {"top_logprobs": [entry(*pair) for pair in token.top]}
        for token in tokens
    ]
