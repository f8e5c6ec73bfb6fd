"""Inputs that a kind may have, and that are hard to describe: models, each with members that are to be tried."""
from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Optional, Union

from pydantic import (
    AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, RootModel, StringConstraints,
    Tag, WithJsonSchema, model_validator,
)
from typing_extensions import Annotated, TypedDict


class Cat(BaseModel):
    t: Literal["cat"]
    m: int


class Dog(BaseModel):
    t: Literal["dog"]
    w: set[int] = set()


class Union_(RootModel[Union[Cat, Dog]]):
    pass


class Tagged(RootModel[Annotated[Union[Cat, Dog], Field(discriminator="t")]]):
    pass


class Perhaps(RootModel[Optional[Cat]]):
    pass


class OneCat(RootModel[Cat]):
    pass


class Mixed(RootModel[Union[Cat, list[int], dict[str, int]]]):
    pass


class AnyNames(RootModel[dict[str, Any]]):
    pass


class Numbers(RootModel[dict[str, int]]):
    pass


class Named(RootModel[dict[Annotated[str, StringConstraints(pattern="^[xyz]+$", max_length=2)], int]]):
    pass


class Bounded(RootModel[Annotated[dict[str, int], Field(min_length=1, max_length=2)]]):
    pass


class NoObject(RootModel[list[int]]):
    pass


class Inner(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int = Field(validation_alias=AliasChoices("a", "b"))


class Paths(BaseModel):
    a: int = Field(validation_alias=AliasPath("cc", "d"))
    b: int = Field(default=1, validation_alias=AliasPath("l", 1))
    c: int = Field(default=1, validation_alias=AliasPath("last", -1))


class SharedPaths(BaseModel):
    a: int = Field(validation_alias=AliasPath("cc", "d"))
    b: int = Field(validation_alias=AliasChoices("bb", AliasPath("cc", "e")))


class Choices(BaseModel):
    b: int = Field(validation_alias=AliasChoices("b1", "b2", AliasPath("x", 0)), description="How many.")
    c: Inner | None = Field(default=None, validation_alias=AliasChoices("c1", "c2"))


class ByName(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    a: int = Field(alias="A")


class ByNameAlone(BaseModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=False)
    a: int = Field(alias="A")


class Like(BaseModel):
    m: int


class Told(BaseModel):
    pet: Annotated[Union[Annotated[Cat, Tag("old")], Annotated[Like, Tag("new")], Annotated[Inner, Tag("any")]],
                   Discriminator(lambda value: "old" if "t" in value else "new" if "m" in value else "any")]
    same: Annotated[Union[Annotated[dict[str, int], Tag("a")], Annotated[dict[str, Any], Tag("b")]],
                    Discriminator(lambda value: "b")] = {}


class Sets(BaseModel):
    s: set[int] = set()
    f: frozenset[str] = Field(default=frozenset(), max_length=1)


class Money(BaseModel):
    d: Decimal


class AnyMoney(BaseModel):
    d: Decimal = Field(allow_inf_nan=True)


class Stripped(BaseModel):
    s: Annotated[str, StringConstraints(strip_whitespace=True, max_length=2, pattern="^a+$")] = "a"
    t: Annotated[str, StringConstraints(to_lower=True, max_length=2, pattern="^[A-Z]*$")] = ""
    u: str = Field(default="", pattern="(?i)^b*$")
    v: str = Field(default="", pattern=re.compile("^b*$", re.IGNORECASE))


class AllStripped(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    s: str = Field(max_length=1)


class Listed(BaseModel):
    names: Annotated[list[str], BeforeValidator(lambda value: value.split() if isinstance(value, str) else value)]


class Renamed(BaseModel):
    a: int

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, value: Any) -> Any:
        return {"a": value["old"]} if isinstance(value, dict) and "old" in value else value


@dataclass
class Point:
    x: int


class Corner(NamedTuple):
    x: int


class Pair(TypedDict):
    x: int


class Places(BaseModel):
    point: Point | None = None
    pair: Pair | None = None
    corner: Corner | None = None


_TEXTS = ["1", "1.5", "-.5", "5.", "+1", "1e5", "1E+5", " 1 ", "1_0", "_1_", "1_.0", "\u0663", "\u00a01", "\U0001d7d8",
          "NaN", "-nan", "sNaN", "Infinity", "-inf", "x", "", " ", ".", "-", "_", "e5", "1e", "1.5.5", ".5.5", "1 0",
          "0x1", "1,5", "--1", "1\n", "\x1c1"]
_CATS: list[Any] = [
    {"t": "cat", "m": 1}, {"t": "cat"}, {"t": "dog"}, {"t": "dog", "w": [1, 1]}, {"t": "dog", "m": 1}, {"t": "cow"}, {},
    {"t": "cat", "m": 1, "z": 1}, {"x": 1}]

TRIED: list[tuple[type[BaseModel], list[Any]]] = [
    (Union_, _CATS), (Tagged, _CATS), (Perhaps, _CATS), (OneCat, _CATS), (Mixed, _CATS),
    (AnyNames, [{}, {"a": 1}, {"a": {"b": None}}]), (Numbers, [{}, {"a": 1}, {"a": "x"}]), (NoObject, [{}, {"a": 1}]),
    (Named, [{}, {"x": 1}, {"xyz": 1}, {"a": 1}, {"x": "x"}]),
    (Bounded, [{}, {"a": 1}, {"a": 1, "b": 1}]), (AllStripped, [{"s": " a "}, {"s": "a"}, {}]),
    (Paths, [{"cc": {"d": 3}}, {"cc": {"d": 3, "e": 4}}, {"cc": {"d": "x"}}, {"cc": {}}, {"cc": [3]}, {"cc": 3}, {},
             {"a": 3}, {"c": 3}, *({"cc": {"d": 3}, **more} for more in (
                 {"l": [0, 1]}, {"l": [0, "x"]}, {"l": [0]}, {"l": {}}, {"b": 1}, {"last": [1]}, {"last": []}))]),
    (SharedPaths, [{"cc": {"d": 1, "e": 2}}, {"cc": {"d": 1}, "bb": 2}, {"bb": 2}, {}]),
    (Choices, [{"b1": 1}, {"b2": 1}, {"x": [1]}, {"x": []}, {"b": 1}, {}, {"b1": 1, "b2": 1}, {"b1": 1, "x": [1]},
               *({"b1": 1, **more} for more in (
                   {"c1": {"a": 1}}, {"c2": {"b": 1}}, {"c1": None}, {"c1": {"a": 1, "b": 1}}, {"c1": {}},
                   {"c1": {"a": 1, "z": 1}}, {"c1": None, "c2": None}, {"c": None}))]),
    (Inner, [{"a": 1}, {"b": 1}, {"a": 1, "z": 1}]),
    (ByName, [{"a": 1}, {"A": 1}, {"a": 1, "A": 1}, {}]), (ByNameAlone, [{"a": 1}, {"A": 1}, {}]),
    (Told, [{"pet": {"m": 1}}, {"pet": {"m": 1, "t": "cat"}}, {"pet": {"a": 1}}, {"pet": {}}, {"pet": {"z": 1}},
            {"pet": {"m": 1}, "same": {"x": 1}}, {"pet": {"m": 1}, "same": {"x": "y"}}]),
    (Sets, [{"s": [1, 1]}, {"s": ["x"]}, {"f": ["a", "a"]}, {"s": {}}]),
    (Money, [{"d": text} for text in (*_TEXTS, 1, 1.5, -2, True, None, [])]), (AnyMoney, [{"d": "NaN"}, {"d": "inf"}]),
    (Stripped, [{"s": " aa "}, {"t": "AB"}, {"t": "ab"}, {"t": "ABC"}, {"u": "B"}, {"v": "B"}, {"s": 5}]),
    (Listed, [{"names": "a b"}, {"names": ["a"]}, {}]), (Renamed, [{"old": 1}, {"a": 1}]),
    (Places, [{"point": {"x": 1}}, {"point": {"x": 1, "y": 1}}, {"point": [1]}, {"pair": {"x": 1}}, {"pair": {}},
              {"pair": {"x": 1, "y": 1}}, {"corner": [1]}, {"corner": [1, 2]}, {"corner": {"x": 1}}, {"corner": 5}]),
]


class Dangling(BaseModel):
    a: Annotated[int, WithJsonSchema({"$ref": "#/nowhere"})]


class Elsewhere(BaseModel):
    a: Annotated[int, WithJsonSchema({"$ref": "https://schemas.example/a.json"})]


class Patterned(RootModel[Annotated[dict[str, int], WithJsonSchema(
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^m": {"type": "string"}}})]]):
    pass


class Unwritable(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{1, 2}]})


class NoSchema(BaseModel):
    a: Annotated[int, WithJsonSchema({"type": "many", "minimum": "few"})]


class Composed(RootModel[Annotated[dict[str, int], WithJsonSchema({"allOf": [{"type": "object"}]})]]):
    pass


class Raising(BaseModel):
    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        raise RuntimeError("sec" + "ret")


class Endless(BaseModel):
    a: float = Field(default=float("inf"), ge=-1e400)


class Kept(RootModel[Point]):
    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        return {"type": "object", "properties": {"kind": {"type": "integer"}}}


UNDESCRIBED: list[type[BaseModel]] = [
    Dangling, Elsewhere, Patterned, Unwritable, NoSchema, Composed, Raising, Endless, Kept]
