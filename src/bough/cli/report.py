"""The statistics of an answer, as a line or a JSON object."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.engine.sampler import TokenLogprob
    from bough.engine.stats import RequestStats
    from bough.session.session import Finished
    from bough.text.tokenizer import Tokenizer


WIDTH = 80  # columns


def line(
    finished: "Finished | None", *, plain: bool, sampled: bool, interrupted: bool, width: int | None = WIDTH
) -> str:
    """Return what is shown below an answer, rarely more than a line.

    plain: no tokens were proposed. width: of a line; None: however long it is, for programs that read it.
    """
    parts = []
    if finished is not None:
        stats = finished.stats
        proposing = not plain and stats.steps > 0
        parts = [
            f"{stats.generated_tokens:,} tok",
            _speed(stats.decode_tok_s) if stats.decode_tok_s else "",
            f"TTFT {stats.ttft_s:.2f} s" if stats.ttft_s else "",
            f"prompt {stats.prompt_tokens:,}"
            + (f" ({stats.cached_tokens:,} cached)" if stats.cached_tokens else ""),
            _images(stats) if stats.images else "",
            f"accept {stats.acceptance_length:.2f}/step{stats.proposers}" if proposing else "",
            f"seed {stats.seed}" if sampled else "",
            *stats.approximate,
            "length limit" if finished.reason == "length" else "",
        ]
    parts.append("interrupted" if interrupted else "")
    parts = list(filter(None, parts))
    return " · ".join(parts) if width is None else _wrapped(parts, width)


def _images(stats: "RequestStats") -> str:
    count = f"{stats.images} image{'s' * (stats.images != 1)} of {stats.image_tokens:,} tok"
    return count + (f" encoded in {1000 * stats.image_s:.0f} ms" if stats.encoded_images else "")


def _speed(tok_s: float) -> str:
    return f"{tok_s:,.0f} tok/s" if tok_s >= 100 else f"{tok_s:.1f} tok/s"


def _wrapped(parts: list[str], width: int) -> str:
    """Return the parts with dots between them, in lines of at most `width` columns."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def spent_on_reasoning(
    finished: "Finished | None", text: str, *, limit: int | None, switch: bool, raisable: bool
) -> str:
    """Return what helps if the tokens ran out before there was an answer, else nothing.

    limit: the requested number of tokens; None: the context is the only limit. switch: the template can turn
    thinking off. raisable: the model was made for a longer context.
    """
    if finished is None or finished.reason != "length" or text.strip() or not finished.stats.reasoning_tokens:
        return ""
    tokens = finished.stats.generated_tokens
    full = limit is None or tokens < limit
    more = ("a larger --max-ctx" if raisable else "") if full else f"-n {max(4000, 4 * tokens)}"
    helps = [f"{more} allows more" if more else "", "--no-think answers at once" if switch else ""]
    spent = f"all {tokens:,} tokens {'that the context had left ' if full else ''}were spent on reasoning"
    return ": ".join(filter(None, [spent, ", ".join(filter(None, helps))]))


def result(
    texts: Mapping[str, str],
    finished: "Finished | None",
    paths: Mapping[str, Path | None],
    tokenizer: "Tokenizer",
    *,
    kv: str,
) -> dict[str, Any]:
    """Return the answer as a JSON object. texts: `text` and `reasoning`."""
    answer: dict[str, Any] = {
        **texts,
        "tokens": finished.tokens if finished else None,
        "finish_reason": finished.reason if finished else "cancelled",
        **{name: None if path is None else str(path) for name, path in paths.items()},
        "kv": kv,
        "stats": statistics(finished.stats) if finished else None,
    }
    if finished is not None and finished.logprobs is not None:
        answer["logprobs"] = [_logprob(each, tokenizer) for each in finished.logprobs]
    return answer


def statistics(stats: "RequestStats") -> dict[str, Any]:
    """Return the statistics and a histogram: steps that accepted exactly 0, 1, 2, ... proposed tokens."""
    at_least = [stats.steps, *stats.accepted_by_position]
    histogram = [more - fewer for more, fewer in zip(at_least, [*at_least[1:], 0], strict=True)]
    return stats.as_dict() | {"acceptance_histogram": histogram}


def _logprob(entry_of: "TokenLogprob", tokenizer: "Tokenizer") -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.token_bytes(id).decode(errors="replace"), "id": id, "logprob": logprob}

    return entry(entry_of.token, entry_of.logprob) | {
        "top": [entry(id, logprob) for id, logprob in entry_of.top]
    }
