"""The command line ``--section.key VALUE``, parsed by tyro, with errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from spider_titan.config_schema import key_of, nearest
from spider_titan.toml_file import ConfigError

T = TypeVar("T")

PROGRAM = "run_train.sh"
BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class JobChoice:
    """What the command line says of ``[job]`` that is needed before the rest can be read."""

    config_file: str | None = None
    imports: Annotated[list[str] | None, tyro.conf.arg(name="import")] = None


@dataclass(frozen=True)
class ModelChoice:
    """What the command line says of ``[model]`` that is needed before the rest can be read."""

    name: str | None = None
    flavor: str | None = None


@dataclass(frozen=True)
class Choice:
    """The options that decide which other options there are; None where the command line has none."""

    job: JobChoice = field(default_factory=JobChoice)
    model: ModelChoice = field(default_factory=ModelChoice)


def read_choice(arguments: Sequence[str]) -> Choice:
    """Reads the options that decide which other options there are, and skips all others.

    Raises:
        ConfigError: If one of them has no value.
    """
    choice, _ = _run_tyro(Choice, arguments, default=Choice(), add_help=False)
    return choice


def options_given(arguments: Sequence[str]) -> set[str]:
    """Names of the options on a command line, ``section.key``, as far as they are spelled right."""
    return {_option_name(argument) for argument in arguments if argument.startswith("--")}


def override(config: T, arguments: Sequence[str]) -> T:
    """Replaces the values of ``config``, a dataclass of sections, that the command line gives.

    A switch takes three forms: ``--section.key``, ``--section.no-key`` and ``--section.key True`` or ``False``.
    ``--help`` prints every key with its docstring and leaves with status 0.

    Raises:
        ConfigError: If an option is unknown, or its value is missing, of the wrong type or refused by its dataclass.
    """
    options = dict(_options_of(config))
    switches = {name for name, annotation in options.items() if annotation is bool}
    result, unknown = _run_tyro(
        type(config),
        _spell_switches(arguments, switches),
        default=config,
        description="Trains a model. Values come from the defaults, then --job.config_file, then the command line.",
    )
    for argument in unknown:
        if argument.startswith("--"):
            raise ConfigError(f"command line: no option --{_option_name(argument)}{_suggestion(argument, options)}")
    if unknown:
        raise ConfigError(f"command line: '{unknown[0]}' belongs to no option; the form is --section.key VALUE")
    return result


def _run_tyro(config_class: type[T], arguments: Sequence[str], **settings: Any) -> tuple[T, list[str]]:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            result = tyro.cli(
                config_class,
                args=list(arguments),
                prog=PROGRAM,
                use_underscores=True,
                return_unknown_args=True,
                **settings,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(f"command line: {_first_sentence(errors.getvalue())}") from None
    sys.stderr.write(errors.getvalue())
    return result


def _first_sentence(box: str) -> str:
    """The message of the box that tyro draws: its first paragraph, without the frame and the help after it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    message: list[str] = []
    for line in plain.splitlines():
        if line.startswith(("╭", "╰")):
            continue
        words = line.strip("│ ")
        if not words or words.startswith("─"):
            break
        message.append(words)
    # tyro names a table by its attributes; the model's own keys have one that stands in no file.
    return " ".join(message).removeprefix("Error parsing ").replace("model.config:", "model:")


def _option_name(argument: str) -> str:
    """``--training.local-batch-size=4`` -> ``training.local_batch_size``."""
    return argument.removeprefix("--").partition("=")[0].replace("-", "_")


def _options_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option that tyro makes of ``value``, a dataclass, with its annotation."""
    hints = get_type_hints(type(value))
    for one in dataclasses.fields(value):
        name = ".".join(filter(None, (prefix, key_of(one))))
        yield from _options_of_item(getattr(value, one.name), hints[one.name], name)


def _options_of_item(item: Any, annotation: Any, name: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(item):
        yield from _options_of(item, name)
    elif isinstance(item, dict) and item:
        for key, value in item.items():
            yield from _options_of_item(value, type(value), f"{name}.{key.replace('-', '_')}")
    elif isinstance(item, (list, tuple)) and any(map(dataclasses.is_dataclass, item)):
        for index, value in enumerate(item):
            yield from _options_of_item(value, type(value), f"{name}.{index}")
    else:
        yield name, annotation


def _spell_switches(arguments: Sequence[str], switches: set[str]) -> list[str]:
    """Turns ``--a.b True`` and ``--a.b=False`` into ``--a.b`` and ``--a.no_b``, the only forms that tyro knows."""
    spelled: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name = _option_name(argument)
        if not argument.startswith("--") or name not in switches:
            spelled.append(argument)
            continue
        _, separator, value = argument.partition("=")
        if not separator and rest and rest[0].lower() in BOOLEANS:
            value = rest.pop(0)
        elif separator and value.lower() not in BOOLEANS:
            raise ConfigError(f"command line: --{name} should be True or False, got '{value}'")
        section, _, key = name.rpartition(".")
        spelled.append(f"--{name}" if not value or BOOLEANS[value.lower()] else f"--{section}.no_{key}")
    return spelled


def _suggestion(argument: str, options: Iterable[str]) -> str:
    name = _option_name(argument)
    key = name.rpartition(".")[2]
    elsewhere = [option for option in options if option.rpartition(".")[2] == key]
    if elsewhere:
        return f"; '{key}' belongs to " + " or ".join(f"--{option}" for option in elsewhere[:3])
    match = nearest(name, options)
    return f"; did you mean --{match}?" if match else "; --help lists all options"
