"""Prebuilt statements, compiled once for a database and handed to its driver. SQLAlchemy's own way, which works out
anew for each execution what it knew before, takes a claim or an end of a job several times as long; and on SQLite all
other writers wait for that."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ARRAY, Connection, Dialect, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

Row = tuple[Any, ...]
Asked = tuple[Any, Any]  # a statement, and its values; or those of several rows, which it is to take one by one
_Convert = Callable[[Any], Any]


@dataclass
class _Ready:
    """A statement for one database: its text, its parameters in the driver's order, each with its name or its constant
    value, and how parameters and columns are converted."""

    text: str
    names: tuple[str, ...] | None  # None: the driver takes them by name
    constants: Mapping[str, Any]
    given: tuple[tuple[str, _Convert | None], ...]
    types: tuple[Any, ...]  # of the columns
    columns: tuple[tuple[int, _Convert], ...] | None = None  # known once the driver has said what it sends

    def parameters(self, values: Mapping[str, Any]) -> Any:
        found = dict(self.constants)
        for name, convert in self.given:
            value = values[name]
            found[name] = value if convert is None else convert(value)
        return found if self.names is None else tuple([found[name] for name in self.names])

    def fetch(self, dialect: Dialect, cursor: Any) -> list[Row]:
        if not self.types:
            return []  # it changes rows, and tells none
        if self.columns is None:  # psycopg works out its description anew each time
            self.columns = tuple(
                (place, convert) for place, (kind, said) in enumerate(zip(self.types, cursor.description))
                if (convert := kind.dialect_impl(dialect).result_processor(dialect, said[1])) is not None)
        fetched: list[Row] = cursor.fetchall()
        return [self._converted(row, self.columns) for row in fetched] if self.columns else fetched

    def _converted(self, fetched: Row, columns: tuple[tuple[int, _Convert], ...]) -> Row:
        row = list(fetched)
        for place, convert in columns:
            row[place] = convert(row[place])
        return tuple(row)


_ready: dict[tuple[Any, str], _Ready] = {}


def rows(tx: Connection, statement: Any, values: Mapping[str, Any]) -> list[Row]:
    """What a statement returns. `statement` lives as long as the process, and has no parameter that expands. Raises
    `sqlalchemy.exc.DBAPIError`."""
    ready = _for(tx.dialect, statement)
    cursor = _execute(tx, ready, ready.parameters(values))
    found = ready.fetch(tx.dialect, cursor)
    cursor.close()
    return found


def together(tx: Connection, *asked: Asked, last: bool = False) -> list[list[Row]]:
    """What each of these statements returns, made in this order; in one round trip, where there are any. None of them
    depends on what another one returns. `last`: nothing follows in the transaction, which may be committed with them.
    Raises `sqlalchemy.exc.DBAPIError`, which tells of the first of them when it cannot be known whose it is."""
    if tx.dialect.name != "postgresql" or len(asked) < 2:
        return [_rows(tx, statement, values) for statement, values in asked]
    ready = [_for(tx.dialect, statement) for statement, _ in asked]
    driver: Any = tx.connection.driver_connection
    try:
        with driver.pipeline():
            cursors = [_execute(tx, each, each.parameters(values)) for each, (_, values) in zip(ready, asked)]
            if last:
                driver.execute("COMMIT")
    except tx.dialect.loaded_dbapi.Error as error:
        raise _raised(tx, ready[0].text, error) from error
    found = [each.fetch(tx.dialect, cursor) for each, cursor in zip(ready, cursors)]
    for cursor in cursors:
        cursor.close()
    return found


def _rows(tx: Connection, statement: Any, values: Any) -> list[Row]:
    if isinstance(values, Mapping):
        return rows(tx, statement, values)
    changed_by_all(tx, statement, values)
    return []


def of_all(tx: Connection, variants: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> Asked:
    """A statement that is made for several rows, one at least: the variant of this database. PostgreSQL's takes them as
    arrays, of the same names: one statement, which would otherwise be made anew for each row."""
    variant = variants[tx.dialect.name]
    if tx.dialect.name != "postgresql":
        return variant, values
    return variant, {name: [each[name] for each in values] for name in values[0]}


def inserts(table: Any, columns: Sequence[Any]) -> dict[str, Any]:
    """The variants, for `of_all`, of an insert of several rows with these columns."""
    names = [column.name for column in columns]
    as_arrays = select(*(func.unnest(bindparam(column.name, type_=ARRAY(column.type))) for column in columns))
    return {"sqlite": sqlite.insert(table).values({name: bindparam(name) for name in names}),
            "postgresql": postgresql.insert(table).from_select(names, as_arrays)}


def first(tx: Connection, statement: Any, values: Mapping[str, Any]) -> Row | None:
    """The first row of these, or None."""
    found = rows(tx, statement, values)
    return found[0] if found else None


def changed(tx: Connection, statement: Any, values: Mapping[str, Any]) -> int:
    """How many rows a statement changes."""
    ready = _for(tx.dialect, statement)
    cursor = _execute(tx, ready, ready.parameters(values))
    number = cursor.rowcount
    cursor.close()
    return int(number)


def changed_by_all(tx: Connection, statement: Any, values: Sequence[Mapping[str, Any]]) -> int:
    """How many rows it changes with all of these."""
    ready = _for(tx.dialect, statement)
    cursor = _execute(tx, ready, [ready.parameters(each) for each in values], many=True)
    number = cursor.rowcount
    cursor.close()
    return int(number)


def listed(column: Any, name: str, most: int) -> Any:
    """Whether a column is one of several values: a condition for what is prebuilt, where a list has as many places as
    it may have values."""
    return column.in_([bindparam(f"{name}_{place}", type_=column.type) for place in range(most)])


def listing(name: str, values: Sequence[Any], most: int) -> dict[str, Any]:
    """The values of such a list, one at least: the last one takes the places that are left."""
    assert 0 < len(values) <= most
    return {f"{name}_{place}": values[min(place, len(values) - 1)] for place in range(most)}


def _execute(tx: Connection, ready: _Ready, parameters: Any, many: bool = False) -> Any:
    cursor = tx.connection.cursor()
    try:
        if many:
            cursor.executemany(ready.text, parameters)
        else:
            cursor.execute(ready.text, parameters)
    except tx.dialect.loaded_dbapi.Error as error:
        raise _raised(tx, ready.text, error) from error
    return cursor


def _raised(tx: Connection, text: str, error: Any) -> DBAPIError:
    """A driver's error as SQLAlchemy raises it."""
    errors = tx.dialect.loaded_dbapi.Error
    gone = tx.dialect.is_disconnect(error, tx.connection.driver_connection, None)
    if gone:
        tx.invalidate(error)
    raised = DBAPIError.instance(
        text, None, error, errors, hide_parameters=True, connection_invalidated=gone, dialect=tx.dialect)
    assert isinstance(raised, DBAPIError)
    return raised


def _for(dialect: Dialect, statement: Any) -> _Ready:
    key = (statement, dialect.name)
    ready = _ready.get(key)
    if ready is None:
        ready = _ready[key] = _prepare(dialect, statement)
    return ready


def _prepare(dialect: Dialect, statement: Any) -> _Ready:
    compiled = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
    assert isinstance(compiled, SQLCompiler)
    known, given, constants = compiled.params, [], {}
    for bind, name in compiled.bind_names.items():
        convert = bind.type.dialect_impl(dialect).bind_processor(dialect)
        if bind.required:
            given.append((name, convert))
        else:
            constants[name] = known[name] if convert is None else convert(known[name])
    types = tuple(column.type for column in getattr(statement, "exported_columns", ()))
    names = None if compiled.positiontup is None else tuple(compiled.positiontup)
    return _Ready(str(compiled), names, constants, tuple(given), types)
