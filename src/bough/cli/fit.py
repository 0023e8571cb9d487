"""`bough show --fit`: how a model would be loaded on a GPU, and which contexts fit. Loads no weights."""

from typing import TYPE_CHECKING, Any

from bough.cli import view
from bough.cli.flags import with_flags
from bough.config import EngineConfig
from bough.errors import ResourceError, UsageError

if TYPE_CHECKING:
    import torch

    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec


def survey(file: "GGUFFile", spec: "ModelSpec", config: EngineConfig) -> dict[str, Any]:
    """Return the plan for the GPU of this machine, else for one with as much memory as the limit."""
    import torch

    from bough.memory.device import assumed_budget, memory_budget
    from bough.memory.planner import MemoryPlanner

    device = torch.device("cuda")
    if torch.cuda.is_available():
        budget = memory_budget(device, config.vram_limit)
    elif config.vram_limit is None:
        raise UsageError("there is no GPU here to plan for", "--vram-limit 24g plans for one of that size")
    else:
        budget = assumed_budget(config.vram_limit)
    planner = MemoryPlanner.create(file, spec, config, device, budget)
    facts: dict[str, Any] = {
        "limit_bytes": budget.limit,
        "in_use_bytes": budget.in_use,
        "context": planner.context,
        "draft": str(config.draft.path) if config.draft else None,
        "pairs": [
            {
                "keys": option.formats[0].name,
                "values": option.formats[1].name,
                "max_context": option.max_ctx,
                "total_bytes": option.total,
                "fits": option.fits,
                "host_embedding": option.host_embedding,
            }
            for option in planner.options()
        ],
        "plan": None,
        "problem": None,
    }
    try:
        plan = planner.plan()
    except ResourceError as error:
        return facts | {"problem": {"message": with_flags(error.message), "hint": with_flags(error.hint)}}
    for option, row in zip(planner.options(), facts["pairs"], strict=True):
        if option.formats == plan.kv and plan.max_ctx == planner.context:
            row |= {"total_bytes": plan.total, "host_embedding": plan.host_embedding}
    summary = {
        "keys": plan.kv[0].name,
        "values": plan.kv[1].name,
        "context": plan.max_ctx,
        "parallel": plan.sequences,
        "shared_tokens": plan.kv_tokens,
        "reason": plan.reason,
        "host_embedding": plan.host_embedding,
        "prefill_chunk": plan.prefill_chunk,
        "parts": dict(plan.parts),
        "total_bytes": plan.total,
        "line": with_flags(plan.line()),
        "notes": [with_flags(note) for note in plan.notes()],
    }
    return facts | {"plan": summary, "speed": _speed(file, config, device)}


def _speed(file: "GGUFFile", config: EngineConfig, device: "torch.device") -> dict[str, Any] | None:
    """Return the predicted speed on this machine's GPU; None: there is none, or it is not known."""
    import torch

    from bough.bench.cards import card_of_device
    from bough.bench.predict import predict

    if not torch.cuda.is_available():
        return None
    card = card_of_device(torch.cuda.get_device_name(device))
    if card is None:
        return None
    sizes = {row["rows"]: row["tok_s"] for row in predict(file.path, config, card)["sizes"]}
    return {"card": card, "plain": sizes[1][1], "tree": sizes[24].get(4) if config.draft else None}


def show(facts: dict[str, Any]) -> None:
    plan, problem = facts["plan"], facts["problem"]
    limit = view.amount(facts["limit_bytes"])
    if plan is not None:
        rows = [[name, view.amount(size)] for name, size in plan["parts"].items()]
        view.table(
            f"On a GPU with {limit}", ["part", "size"], [*rows, ["total", view.amount(plan["total_bytes"])]]
        )
    formats = None if plan is None else (plan["keys"], plan["values"])
    view.table(
        f"KV cache, on {limit}",
        ["format", "longest context", f"all, at {facts['context']:,}", "what it means"],
        [
            [
                "/".join(dict.fromkeys((row["keys"], row["values"]))),
                f"{row['max_context']:,}",
                view.amount(row["total_bytes"]),
                _meaning(row, (row["keys"], row["values"]) == formats),
            ]
            for row in facts["pairs"]
        ],
        texts=["what it means"],
    )
    if plan is None:
        view.paragraphs(problem["message"], f"hint: {problem['hint']}")
    else:
        view.paragraphs(plan["line"], *plan["notes"], *_speed_line(facts.get("speed")))


def _speed_line(speed: dict[str, Any] | None) -> list[str]:
    if speed is None:
        return []
    tree = speed["tree"]
    with_draft = f", {tree[0]:.0f} to {tree[1]:.0f} with the draft at 4 tokens a step" if tree else ""
    return [
        f"About {speed['plain'][0]:.0f} to {speed['plain'][1]:.0f} tok/s on this {speed['card']}{with_draft}"
        " (predicted)."
    ]


def _meaning(row: dict[str, Any], is_plan: bool) -> str:
    words = ["chosen" if is_plan else "fits" if row["fits"] else "too large"]
    if is_plan and not row["fits"]:
        words.append("with a shorter context")
    if row["host_embedding"] and row["fits"]:
        words.append("token embedding in host memory")
    return ", ".join(words)
