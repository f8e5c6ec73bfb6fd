"""A model as JSON Schema, agreeing with how pydantic reads it: what no schema can say is left open, never forbidden."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

Schema = dict[str, Any]
Path = list[str | int]  # where a member is looked for: most often one name

# Decimal() passes underscores over, and reads the digits of every script: all that is not ASCII stands for them here.
_DIGITS = r"[^\u0000-\u002f\u003a-\u007f][^\u0000-\u002f\u003a-\u005e\u0060-\u007f]*"
_MORE = r"[^\u0000-\u002f\u003a-\u005e\u0060-\u007f]*"
_SPACE = r"[\s\u001c-\u001f\u0085]*"
_DECIMAL = rf"^{_SPACE}_*[+\-]?_*({_DIGITS}(\.{_MORE})?|\._*{_DIGITS})([eE]_*[+\-]?_*{_DIGITS})?{_SPACE}$"
_TEXT = "^[^\\u0000]*$"  # what the door takes in any text; halves of surrogate pairs cannot be written here
_OWN_CODE = {"description": "Whatever the kind's own code takes."}
_NOT_EVERYWHERE = re.compile(r"\(\?(?![:=!]|<[=!])|\\[AzZpPQE]|\[\[:|&&")  # what regular expressions elsewhere lack

_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "dependentSchemas")


class Generator(GenerateJsonSchema):
    """Pydantic's own, mended where its schema forbids what its validator takes, or fails."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Schema:
        return dict(_OWN_CODE)

    def emit_warning(self, kind: Any, detail: str) -> None:
        """A default that cannot be written is not written."""

    def get_decimal_pattern(self, schema: core_schema.DecimalSchema) -> str | None:
        return None if schema.get("allow_inf_nan") else _DECIMAL

    def str_schema(self, schema: core_schema.StringSchema) -> Schema:
        """White space that is taken away is not measured. (Cases are changed after that.)"""
        made = super().str_schema(schema)
        flags = getattr(schema.get("pattern"), "flags", re.UNICODE) & ~re.UNICODE
        if flags or _NOT_EVERYWHERE.search(made.get("pattern", "")):
            del made["pattern"]
        stripped = schema.get("strip_whitespace", self._config.str_strip_whitespace)
        unsaid = ("maxLength", "pattern") if stripped else ()
        return {key: value for key, value in made.items() if key not in unsaid}

    def set_schema(self, schema: core_schema.SetSchema) -> Schema:
        return _repeating(super().set_schema(schema))

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> Schema:
        return _repeating(super().frozenset_schema(schema))

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> Schema:
        return _after_own_code(schema, super().function_before_schema(schema))

    def function_wrap_schema(self, schema: core_schema.WrapValidatorFunctionSchema) -> Schema:
        return _after_own_code(schema, super().function_wrap_schema(schema))

    def named_tuple_schema(self, schema: core_schema.NamedTupleSchema) -> Schema:
        return {"anyOf": [super().named_tuple_schema(schema), {"type": "object"}]}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> Schema:
        """A function that tells the choice leaves open whether another one would fit too."""
        made = super().tagged_union_schema(schema)
        if callable(schema["discriminator"]):
            made["anyOf"] = made.pop("oneOf")
        return made

    def _named_required_fields_schema(self, named_required_fields: Sequence[tuple[str, bool, Any]]) -> Schema:
        """Each member under every name that it may have: pydantic writes one of them."""
        paths = {name: self._paths(name, field) for name, _, field in named_required_fields}
        used = Counter(key for found in paths.values() for key in _keys(found))
        made: Schema = {"type": "object", "properties": {}, "required": [], "allOf": []}
        for name, required, field in named_required_fields:
            one = super()._named_required_fields_schema([(name, required, field)])
            for value in one["properties"].values():
                _add(made, paths[name], value, required, used)
        return {key: value for key, value in made.items() if value or key == "properties"}

    def _paths(self, name: str, field: Any) -> list[Path]:
        config, alias = self._config, field.get("validation_alias")
        by_alias = alias is not None and config.validate_by_alias is not False
        paths: list[Path] = []
        if by_alias:
            paths = [[alias]] if isinstance(alias, str) else alias if isinstance(alias[0], list) else [alias]
        if not by_alias or config.validate_by_name or config.populate_by_name:
            paths = [*paths, [name]]
        return paths


def _repeating(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in ("uniqueItems", "maxItems")}


def _after_own_code(schema: Any, made: Schema) -> Schema:
    """What a kind's own function sees first may be anything, unless the function's author says what."""
    if schema.get("json_schema_input_schema") or _is_pydantics(schema["function"]["function"]):
        return made
    return {"anyOf": [made, dict(_OWN_CODE)]}


def _is_pydantics(function: Callable[..., Any]) -> bool:
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith("pydantic.")


def _keys(paths: Sequence[Path]) -> list[str]:
    return list(dict.fromkeys(str(path[0]) for path in paths))


def _add(made: Schema, paths: Sequence[Path], value: Schema, required: bool, used: Counter[str]) -> None:
    """The member's names, and how many of them are to be there: the validator takes one, and knows no second."""
    keys = _keys(paths)
    shared = any(used[key] > 1 for key in keys)
    for key in keys:
        own = [path for path in paths if path[0] == key]
        if used[key] > 1 or len(own) > 1:
            made["properties"][key] = {"description": "Several things are read from it."}
        else:
            made["properties"][key] = _noted(_within(own[0][1:], value), key, keys)
    if len(keys) == 1:
        made["required"] += [key for key in keys if required and key not in made["required"]]
        return
    given: list[Schema] = [{"required": [key]} for key in keys]
    if not shared:
        made["allOf"].append({"oneOf": given if required else [*given, {"not": {"anyOf": given}}]})
    elif required:
        made["allOf"].append({"anyOf": given})


def _within(path: Path, value: Schema) -> Schema:
    """The value at its place in an object or array; what else is there is not looked at."""
    for step in reversed(path):
        if isinstance(step, str):
            value = {"type": "object", "properties": {step: value}, "required": [step], "unevaluatedProperties": {}}
        elif step >= 0:
            value = {"type": "array", "prefixItems": [*[{}] * step, value], "minItems": step + 1}
        else:
            value = {"type": "array", "minItems": -step}
    return value


def _noted(value: Schema, key: str, keys: Sequence[str]) -> Schema:
    others = ", ".join(f"`{other}`" for other in keys if other != key)
    if not others:
        return value
    untitled = {key: member for key, member in value.items() if key != "title"}
    description = f"{value.get('description', '')} It is also called {others}: one of these names is given."
    return {**untitled, "description": description.strip()}


def of_the_door(schema: Any) -> Any:
    """As pydantic describes it, and as the door reads it: no unknown members, no NUL in a text."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in _ONE:
        if key in made:
            made[key] = of_the_door(made[key])
    for key in _LISTS:
        if key in made:
            made[key] = [of_the_door(one) for one in made[key]]
    for key in _MAPS:
        if key in made:
            made[key] = {name: of_the_door(one) for name, one in made[key].items()}
    if "properties" in made and "unevaluatedProperties" not in made:
        made["additionalProperties"] = False
    if made.get("type") == "string" and not {"pattern", "enum", "const", "format"} & set(made):
        made["pattern"] = _TEXT
    return made
