"""`bough show --fit`: how a model would be loaded, which contexts fit, about how fast. Loads no weights."""

from typing import TYPE_CHECKING, Any

from bough.cli import view
from bough.cli.flags import with_flags
from bough.cli.listing import read_share
from bough.config import EngineConfig
from bough.errors import ResourceError, UsageError

if TYPE_CHECKING:
    import torch

    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec


def survey(file: "GGUFFile", spec: "ModelSpec", config: EngineConfig) -> dict[str, Any]:
    """Return the plan for this machine's GPU, for one with as much memory as the limit, or for the CPU."""
    import torch

    from bough.memory.device import assumed_budget, memory_budget
    from bough.memory.planner import MemoryPlanner

    here = torch.cuda.is_available() or config.vram_limit is None
    device = torch.device("cuda" if torch.cuda.is_available() or config.vram_limit else "cpu")
    if here:
        budget = memory_budget(device, config.vram_limit)
    else:
        assert config.vram_limit is not None
        budget = assumed_budget(config.vram_limit)
    planner = MemoryPlanner.create(file, spec, config, device, budget)
    facts: dict[str, Any] = {
        "device": device.type,
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
        "expert_slots": plan.estimate.expert_slots,
        "prefill_chunk": plan.prefill_chunk,
        "parts": dict(plan.parts),
        "total_bytes": plan.total,
        "line": with_flags(plan.line()),
        "notes": [with_flags(note) for note in plan.notes()],
    }
    # Nothing is predicted of experts that are read over a bus.
    speeds = [] if plan.estimate.host_experts else _speeds(file, config, device, here=here)
    return facts | {"plan": summary, "speeds": speeds}


def _speeds(
    file: "GGUFFile", config: EngineConfig, device: "torch.device", *, here: bool
) -> list[dict[str, Any]]:
    """Return predicted speeds: of this machine, or of known cards with about the memory planned for."""
    import torch

    from bough.bench.cards import MEMORY, TREE_TOKENS, about_tok_s, card_of_device
    from bough.bench.predict import predict

    if device.type == "cpu":
        active = read_share(file.path.stem)
        plain, _ = about_tok_s(file.size_bytes, active, "CPU", draft=False) or (0.0, None)
        return [{"card": "CPU", "plain": (plain, plain), "tree": None}]
    if here:
        named = card_of_device(torch.cuda.get_device_name(device))
        cards = [] if named is None else [named]
    else:
        size = (config.vram_limit or 0) / 2**30
        cards = [card for card, memory in MEMORY.items() if 0.9 * memory <= size <= 1.1 * memory]
    rows = []
    for card in cards:
        try:
            speeds = {row["rows"]: row["tok_s"] for row in predict(file.path, config, card)["sizes"]}
        except UsageError:
            return []  # it has types whose matmuls were not measured: what fits is said all the same
        tree = speeds[24].get(TREE_TOKENS) if config.draft else None
        rows.append({"card": card, "plain": speeds[1][1], "tree": tree})
    return rows


def show(facts: dict[str, Any]) -> None:
    plan, problem = facts["plan"], facts["problem"]
    kind, limit = "a GPU" if facts["device"] == "cuda" else "this CPU", view.amount(facts["limit_bytes"])
    if plan is not None:
        rows = [[name, view.amount(size)] for name, size in plan["parts"].items()]
        view.table(
            f"On {kind} with {limit}", ["part", "size"], [*rows, ["total", view.amount(plan["total_bytes"])]]
        )
    formats = None if plan is None else (plan["keys"], plan["values"])
    view.table(
        f"KV cache, on {limit}",
        ["format", "longest context, one request", f"all, at {facts['context']:,}", "what it means"],
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
        speeds = [_speed_line(row) for row in facts["speeds"]]
        view.paragraphs(plan["line"], *plan["notes"], "\n".join(speeds) + " (predicted)." if speeds else "")


def _speed_line(speed: dict[str, Any]) -> str:
    plain, tree, with_draft = speed["plain"], speed["tree"], ""
    if tree is not None:
        pays = tree[1] > plain[0]
        with_draft = (
            f", {_span(tree)} with the draft at 4 tokens a step" if pays else "; the draft hardly pays"
        )
    return f"{speed['card']}: about {_span(plain)} tok/s{with_draft}"


def _span(speeds: tuple[float, float]) -> str:
    low, high = (f"{speed:.{int(speed < 10)}f}" for speed in speeds)
    return low if low == high else f"{low} to {high}"


def _meaning(row: dict[str, Any], is_plan: bool) -> str:
    words = ["chosen" if is_plan else "fits" if row["fits"] else "too large"]
    if is_plan and not row["fits"]:
        words.append("with a shorter context")
    if row["host_embedding"] and row["fits"]:
        words.append("token embedding in host memory")
    return ", ".join(words)
