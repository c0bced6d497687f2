"""TOML files that build on other TOML files.

``extends = "base.toml"``, the first line of a file, reads another file first; its path is relative to the file that
says so. Tables are merged key by key, and a key of the extending file wins; arrays and arrays of tables are replaced
whole. Every value remembers the file it came from, so that an error can name it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KeyPath = tuple[str | int, ...]
"""Where a value stands: table names, keys and array indices from the top of the file."""

Alternatives = Sequence[tuple[KeyPath, KeyPath]]
"""Pairs of keys that exclude each other."""


class ConfigError(ValueError):
    """A mistake in the user's configuration, told in one line that names the file, the key and the remedy."""

    def __init__(self, message: str) -> None:
        # What it quotes, such as the error of a user's module, may have several lines.
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


@dataclass
class TomlFile:
    """The merged content of a file and of those it extends.

    Args:
        values: The tables.
        origins: Which file a value, or everything below it, came from. Holds at least the empty path.
    """

    values: dict[str, Any]
    origins: dict[KeyPath, Path] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> Path | None:
        """The file that ``path`` was read from; for a key that no file has, the file of the table around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None

    def origin_of_table(self, path: KeyPath) -> Path | None:
        """The file that the whole table at ``path`` was read from; the outermost file where several had a part."""
        files = {file for known, file in self.origins.items() if known[: len(path)] == path}
        return files.pop() if len(files) == 1 else self.origin(path if not files else ())


def read_toml(path: Path, alternatives: Alternatives = ()) -> TomlFile:
    """Reads ``path`` and what it extends.

    Args:
        path: The TOML file.
        alternatives: Pairs of keys of which a file that sets one drops the other, where it is inherited.

    Raises:
        ConfigError: If a file is missing, unreadable or not TOML, or if the files extend each other in a circle.
    """
    return _read(path, alternatives, ())


def format_path(path: KeyPath) -> str:
    """``("data", "phases", 1, "until")`` -> ``data.phases[1].until``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _read(path: Path, alternatives: Alternatives, extended_by: tuple[Path, ...]) -> TomlFile:
    chain = (*extended_by, path)
    if path.resolve() in {file.resolve() for file in extended_by}:
        raise ConfigError(f"{chain[0]}: extends runs in a circle: {' -> '.join(map(str, chain))}")
    own = _parse(path, extended_by)
    parent = own.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"{path}: extends should be the path of one TOML file, got {parent!r}")
    merged = TomlFile({}) if parent is None else _read(path.parent / parent, alternatives, chain)
    for pair in alternatives:
        given = [key for key in pair if _has(own, key)]
        if len(given) == 1:
            _remove(merged.values, pair[1 - pair.index(given[0])])
    _overlay(merged, merged.values, own, path, ())
    merged.origins[()] = path
    return merged


def _parse(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: byte {error.start} is not UTF-8") from error
    except OSError as error:
        place = f"{extended_by[-1]}: extends: " if extended_by else "job.config_file: "
        raise ConfigError(f"{place}cannot read '{path}': {error.strerror}") from error


def _overlay(merged: TomlFile, base: dict[str, Any], own: Mapping[str, Any], file: Path, prefix: KeyPath) -> None:
    for key, value in own.items():
        path = (*prefix, key)
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(merged, base[key], value, file, path)
            continue
        base[key] = value
        for stale in [known for known in merged.origins if known[: len(path)] == path]:
            del merged.origins[stale]
        merged.origins[path] = file


def _has(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _remove(values: dict[str, Any], path: KeyPath) -> None:
    if _has(values, path):
        for part in path[:-1]:
            values = values[str(part)]
        del values[str(path[-1])]
