"""Hypothesis strategies: values by a pydantic model's JSON schema, odd ones among them; and bytes with mutations."""

from __future__ import annotations

import random
from typing import Any, get_type_hints

from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from fedaudit.utils.registry import Plugin, settings_of

Draw = st.SearchStrategy[Any]

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0, 1e-300, 1e300, 5e-324),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "x" * 5000,
        "²",
        "٣",
        "\ud800",
        "\x00",
        "a\nb",
        "\x1b[2J",
        "$\\frac$",
        "[/x]",
    ),
    *(
        "<script>alert(1)</script>",
        "=1+1",
        "../../x",
        "/dev/zero",
        "~",
        "{{ 7*7 }}",
        "%s%n",
        "null",
        "1:59",
        "2024-01-01",
    ),
    *([], {}, [[]], [None], {"": ""}, {"a": {"b": []}}, {"name": None}, {"name": "x"}, ["x", "x"], [0, 0, 1], [1e300]),
]
odd: Draw = st.sampled_from(ODD)
few: Draw = st.integers(0, 12)


def by_schema(model: type[BaseModel] | TypeAdapter[Any]) -> Draw:
    """Return a strategy for what ``model`` is made from: mostly what its schema allows, small where it may be."""
    schema = model.json_schema() if isinstance(model, TypeAdapter) else model.model_json_schema()
    return _values(schema, schema.get("$defs", {}), 0)


def by_settings(plugin: type[Plugin]) -> Draw:
    """Return a strategy for the settings of a plug-in, by their types."""
    hints: dict[str, Any] = get_type_hints(plugin, include_extras=True)
    types = {name: hints[name] if name in hints else hints[f"{name}_"] for name in settings_of(plugin)}
    return st.fixed_dictionaries({}, optional={n: by_schema(TypeAdapter(kind)) | odd for n, kind in types.items()})


def _values(schema: dict[str, Any], known: dict[str, Any], depth: int) -> Draw:
    if "$ref" in schema:
        return _values(known[schema["$ref"].rpartition("/")[2]], known, depth + 1)
    if depth > 12:
        return st.none()
    for words in ("anyOf", "oneOf", "allOf"):
        if words in schema:
            return st.one_of([_values(one, known, depth + 1) for one in schema[words]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    least, most = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum")
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            return st.integers(int(least), int(least) + 12) | st.integers(int(least), int(most or 2**70))
        case "number":
            return st.floats(float(least), 10.0) | st.floats()
        case "string":
            return st.sampled_from(["a", "f", "sgd", "invg", "psnr", "iid", "mean"]) | st.text(max_size=8) | odd
        case "array":
            items = _values(schema["items"], known, depth + 1) if "items" in schema else odd
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
        case "object":
            return _mapping(schema, known, depth)
    return odd


def _mapping(schema: dict[str, Any], known: dict[str, Any], depth: int) -> Draw:
    fields = {name: _values(one, known, depth + 1) for name, one in schema.get("properties", {}).items()}
    needed = set(schema.get("required", ()))
    fixed = st.fixed_dictionaries(
        {name: fields[name] for name in fields if name in needed},
        optional={name: fields[name] for name in fields if name not in needed},
    )
    more = schema.get("additionalProperties")
    if isinstance(more, dict) and more:
        others = st.dictionaries(
            st.sampled_from("abc") | st.text(max_size=5), _values(more, known, depth + 1), max_size=3
        )
        return st.builds(lambda a, b: {**b, **a}, fixed, others)
    return fixed


def changed(whole: Any, values: Draw = odd, most: int = 3) -> Draw:
    """Return a strategy for ``whole`` (of dicts and lists) with one to ``most`` places set, removed or added."""

    def change(seed: int, drawn: list[Any]) -> Any:
        rng, made = random.Random(seed), whole
        for value in drawn:
            made = _changed(made, rng, value)
        return made

    return st.builds(change, st.integers(0, 2**32), st.lists(odd | values, min_size=1, max_size=most))


def _changed(node: Any, rng: random.Random, value: Any) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.9:
        key = rng.choice(list(node))
        if rng.random() < 0.05:
            return {k: v for k, v in node.items() if k != key}
        if rng.random() < 0.05:
            return {**node, str(value): value}
        return {**node, key: _changed(node[key], rng, value)}
    if isinstance(node, list) and node and rng.random() < 0.9:
        place = rng.randrange(len(node))
        if rng.random() < 0.1:
            return [*node, node[place]]
        return [_changed(one, rng, value) if i == place else one for i, one in enumerate(node)]
    return value


NUMBERS = [b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\xff" * 8, b"\x00" * 8]


def mutated(seeds: list[bytes], words: list[bytes], seed: int) -> bytes:
    """Return one of ``seeds`` with bytes changed, removed, repeated, or taken of another; ``words`` are put in, too."""
    rng = random.Random(seed)
    whole = bytearray(rng.choice(seeds))
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        size = len(whole)
        at = rng.randrange(size + 1) if rng.random() < 0.5 else min(size, int(size * rng.random() ** 6))
        if rng.random() < 0.2:  # directories stand at the end of many formats
            at = max(0, size - 1 - rng.randrange(300))
        length = rng.choice([1, 1, 2, 4, 16, 200])
        match rng.randrange(8):
            case 0:
                whole[at : at + 1] = bytes([rng.randrange(256)])
            case 1 if at < size:
                whole[at] ^= 1 << rng.randrange(8)
            case 2:
                del whole[at : at + length]
            case 3:
                whole[at:at] = whole[at : at + length] * rng.choice([1, 2, 50])
            case 4:
                word = rng.choice(NUMBERS)
                whole[at : at + len(word)] = word
            case 5 if words:
                whole[at:at] = rng.choice(words)
            case 6:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                whole[at : at + length] = other[start : start + length]
            case _:
                del whole[rng.randrange(size + 1) :]
    return bytes(whole)
