"""Tables of a TOML file -> dataclasses, strictly, with errors that name the file, the key and what was meant."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from spider_titan.toml_file import ConfigError, KeyPath, TomlFile, format_path

T = TypeVar("T")


def key_of(field: dataclasses.Field[Any]) -> str:
    """The TOML key of a dataclass field: ``metadata["key"]``, where Python does not allow the name, else its name."""
    return str(field.metadata.get("key", field.name))


def annotations_of(config_class: type) -> dict[str, Any]:
    """TOML key -> annotation, ``Annotated`` stripped, of the fields of a dataclass."""
    hints = get_type_hints(config_class)
    return {key_of(field): hints[field.name] for field in dataclasses.fields(config_class) if field.init}


def unwrap_optional(annotation: Any) -> Any:
    """``X | None`` -> ``X``; anything else as it is."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return unwrap_optional(members[0])
    return annotation


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was most likely meant to be."""
    by_spelling = {candidate.replace("-", "_").lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.replace("-", "_").lower(), by_spelling, n=1)
    return by_spelling[matches[0]] if matches else None


class Schema:
    """Which keys the tables of a configuration may have.

    Args:
        sections: Name of a top-level table -> the dataclasses whose fields are its keys.
    """

    def __init__(self, sections: Mapping[str, Sequence[type]]) -> None:
        self._sections = {name: _merge_annotations(classes) for name, classes in sections.items()}

    def require_known_sections(self, file: TomlFile) -> None:
        """Refuses a top-level key that is no section, and a section that is no table."""
        for name, value in file.values.items():
            if name not in self._sections:
                raise ConfigError(f"{file.origin((name,))}: {self._explain_section(name)}")
            if not isinstance(value, dict):
                raise ConfigError(f"{file.origin((name,))}: {name} should be a table [{name}], got {show(value)}")

    def require_known_keys(self, file: TomlFile, section: str) -> None:
        """Refuses any key in a section, or in a table inside it, that no dataclass has."""
        for path, table, known in _tables_in(file.values.get(section, {}), self._sections[section], (section,)):
            for key in table:
                if key not in known:
                    where = (*path, key)
                    raise ConfigError(f"{file.origin(where)}: {self._explain_key(key, path, known)}")

    def _explain_section(self, name: str) -> str:
        homes = self._homes(name)
        if homes:
            return f"no section is called '{name}'; it belongs to {homes}"
        return f"no section is called '{name}'" + _suggestion(name, self._sections)

    def _explain_key(self, key: str, path: KeyPath, known: Iterable[str]) -> str:
        text = f"[{format_path(path)}] has no key '{key}'"
        if key == "extends":
            return text + "; it belongs to the top of the file, above all tables"
        homes = self._homes(key)
        if homes:
            return f"{text}; it belongs to {homes}"
        return text + _suggestion(key, known)

    def _homes(self, key: str) -> str:
        tables = [
            table
            for section, known in self._sections.items()
            for table, keys in _tables_of(known, section)
            if key in keys
        ]
        return " or ".join(f"[{table}]" for table in tables)


def convert(config_class: type[T], table: Mapping[str, Any], *, section: str, file: TomlFile) -> T:
    """Makes the dataclass of a section from its table.

    Types are strict: no number for a bool, no bool or string for a number, no float for an int. A whole number may
    stand for a float. Keys that are unknown are not looked at; ``Schema`` refuses them.

    Args:
        config_class: The dataclass.
        table: Key -> value as TOML has them; None is an unset value.
        section: Name of the table, for errors.
        file: Where the table came from, for errors.

    Raises:
        ConfigError: If a value has the wrong type, is missing, or is refused by the dataclass itself.
    """
    try:
        # Read as JSON, because only there does strict mode take a table for a dataclass and an array for a tuple.
        return TypeAdapter(config_class).validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain_value(error, table, section, file)) from error


def dump(config: Any) -> dict[str, Any]:
    """The table of a section's dataclass, with None for what is unset."""
    table: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json", by_alias=True)
    return table


def drop_unset(table: Any) -> Any:
    """Leaves out what is None, which TOML has no word for, at any depth."""
    if isinstance(table, dict):
        return {key: drop_unset(value) for key, value in table.items() if value is not None}
    if isinstance(table, list):
        return [drop_unset(value) for value in table]
    return table


def show(value: Any) -> str:
    """A value as a TOML file has it, as far as one line tells it."""
    if isinstance(value, Mapping):
        return "a table"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain_value(error: ValidationError, table: Mapping[str, Any], section: str, file: TomlFile) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    key_path = _existing(table, first["loc"])
    path: KeyPath = (section, *key_path)
    place = f"{file.origin(path) or 'defaults'}: {format_path(path)}"
    if first["type"] == "missing":
        # The rest of the location is the key that is not there.
        return f"{place}: {format_path(first['loc'][len(key_path) :])} is missing"
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ").removeprefix(f"{format_path(path)}.")
        return f"{file.origin_of_table(path) or 'defaults'}: {format_path(path)}: {message}"
    # A union has one problem for each of its members, at the same place in the table.
    same_place = [problem["msg"] for problem in problems if _existing(table, problem["loc"]) == key_path]
    wanted = " or ".join(dict.fromkeys(text.removeprefix("Input should be ") for text in same_place))
    return f"{place} should be {wanted}, got {show(first['input'])}"


def _existing(table: Any, location: Sequence[str | int]) -> KeyPath:
    """The part of a location that is a place in the table; what follows names a member of a union or a missing key."""
    path: list[str | int] = []
    for part in location:
        try:
            table = table[part]
        except (KeyError, IndexError, TypeError):
            break
        path.append(part)
    return tuple(path)


def _merge_annotations(classes: Sequence[type]) -> dict[str, Any]:
    return {key: annotation for one in classes for key, annotation in annotations_of(one).items()}


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = list(known)
    match = nearest(name, known)
    return f"; did you mean '{match}'?" if match else f"; known: {', '.join(known)}"


def _tables_in(
    table: Any, known: Mapping[str, Any], path: KeyPath
) -> Iterator[tuple[KeyPath, dict[str, Any], Mapping[str, Any]]]:
    """Every table of ``table`` that a dataclass stands for, with the keys it may have."""
    yield path, table, known
    for key, annotation in known.items():
        if key in table:
            yield from _tables_in_value(table[key], unwrap_optional(annotation), (*path, key))


def _tables_in_value(
    value: Any, annotation: Any, path: KeyPath
) -> Iterator[tuple[KeyPath, dict[str, Any], Mapping[str, Any]]]:
    members = get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(value, dict):
        assert isinstance(annotation, type)
        yield from _tables_in(value, annotations_of(annotation), path)
    elif isinstance(value, dict) and get_origin(annotation) is dict:
        for key, item in value.items():
            yield from _tables_in_value(item, unwrap_optional(members[1]), (*path, key))
    elif isinstance(value, list) and get_origin(annotation) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tables_in_value(item, unwrap_optional(members[0]), (*path, index))


def _tables_of(known: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table that may stand in a section: its name and its keys."""
    yield name, known
    for key, annotation in known.items():
        inner, title = unwrap_optional(annotation), f"{name}.{key}"
        if get_origin(inner) is dict:
            inner, title = unwrap_optional(get_args(inner)[1]), f"{title}.NAME"
        elif get_origin(inner) in (list, tuple):
            inner = unwrap_optional(get_args(inner)[0])
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type)
            yield from _tables_of(annotations_of(inner), title)
