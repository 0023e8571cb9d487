"""JSON schemas of any shape whose answers are short; the benchmark of constrained speed takes them too."""

import random
from typing import Any


def random_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of any shape, with a longest answer of a few hundred characters."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = choose.choice(kinds + ["object", "array", "anyOf"] * (2 if depth < 2 else 0))
    match kind:
        case "string":
            return {"type": "string", "maxLength": choose.randint(0, 5)}
        case "integer":
            low = choose.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 2000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": choose.sample(["red", "blue", 5, True, None, "a b"], choose.randint(1, 4))}
        case "const":
            return {"const": choose.choice(["fixed", 17, False])}
        case "pattern":
            return {"type": "string", "pattern": choose.choice([r"^[A-Z]{2}-\d{3}$", "^(on|off)$"])}
        case "array":
            most = choose.randint(0, 3)
            least = choose.randint(0, most)
            return {
                "type": "array",
                "items": random_schema(choose, depth + 1),
                "minItems": least,
                "maxItems": most,
            }
        case "anyOf":
            return {"anyOf": [random_schema(choose, depth + 1) for _ in range(choose.randint(1, 3))]}
    names = choose.sample(["id", "name", "long_key_with_words", "ünï", "x y", "z"], choose.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(choose, depth + 1) for name in names},
        "required": [name for name in names if choose.random() < 0.7],
        "additionalProperties": False,
    }


def random_tools(choose: random.Random) -> list[dict[str, Any]]:
    """One to three tools with parameters of any shape."""
    tools = []
    for index in range(choose.randint(1, 3)):
        keys = choose.sample(["city", "days", "units", "mode"], choose.randint(0, 3))
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": {key: random_schema(choose, 1) for key in keys},
            "required": [key for key in keys if choose.random() < 0.7],
        }
        if choose.random() < 0.5:
            parameters["additionalProperties"] = False
        function = {"name": f"tool_{index}", "parameters": parameters, "strict": choose.random() < 0.5}
        tools.append({"type": "function", "function": function})
    return tools
