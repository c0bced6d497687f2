"""The configuration of a run: one dataclass a section, each defined beside the component that reads it.

Values come from the defaults, then the TOML file (which may extend others), then the command line. The keys of
``[model]`` are those of the chosen model, so the file and the command line are asked for the model first, then read.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pydantic
import tomli_w
import tyro

from spider_titan.checkpoint.config import CheckpointConfig
from spider_titan.config_cli import Choice, options_given, override, read_choice
from spider_titan.config_schema import Schema, annotations_of, convert, drop_unset, dump, nearest
from spider_titan.data.config import DataConfig
from spider_titan.distributed import CommConfig, ParallelismConfig
from spider_titan.metrics import MetricsConfig
from spider_titan.monitor import MonitorConfig
from spider_titan.optim import LRSchedulerConfig, OptimizerConfig
from spider_titan.plugins import activation_checkpoint
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.compile import CompileConfig
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.profiling import ProfilingConfig
from spider_titan.spec import ModelSpec, get_model_spec
from spider_titan.toml_file import Alternatives, ConfigError, TomlFile, format_path, read_toml
from spider_titan.trainer import TrainingConfig
from spider_titan.validate import ValidationConfig

__all__ = ["ConfigError", "JobConfig", "JobSection", "ModelSection", "check", "load_config", "num_ranks", "to_toml"]

ALTERNATIVES: Alternatives = ((("training", "steps"), ("training", "byte_budget")),)
"""Where a file or the command line gives one of a pair, the other one is dropped if it was inherited."""

ON_COMMAND_LINE = {
    "config_file": "a file builds on another with extends",
    "dry_run": "a run directory's configuration is to be run for real",
}
"""Keys of ``[job]`` that no file may set, and why."""

HEADER = (
    "# The effective configuration of a run: defaults, files and command line. --job.config_file reads it again.\n\n"
)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class JobSection:
    """The section ``[job]``."""

    config_file: Annotated[str | None, pydantic.Field(exclude=True)] = field(default=None, compare=False)
    """TOML file to read. On the command line only: a file names the one it builds on with extends."""
    dump_folder: str = "outputs/run"
    """The run directory: effective configuration, logs, metrics and curves."""
    time_limit: float | None = None
    """Seconds after which the run saves and ends with exit status 75, to be started again. Unset: no limit."""
    dry_run: Annotated[bool, pydantic.Field(exclude=True)] = field(default=False, compare=False)
    """Build, shard and describe the model on imagined ranks (NGPU x NNODES), then stop. On the command line only."""
    import_: Annotated[
        list[str],
        tyro.conf.arg(name="import"),
        pydantic.Field(alias="import"),
        pydantic.BeforeValidator(_as_list),
    ] = field(default_factory=list, metadata={"key": "import"})
    """Modules to import first, so that they can register models of your own; the current folder is searched too."""

    def __post_init__(self) -> None:
        if not self.dump_folder:
            raise ValueError("dump_folder is empty: name a folder, such as outputs/run")
        if self.time_limit is not None and self.time_limit <= 0:
            raise ValueError(f"time_limit = {self.time_limit} must be above 0")


@dataclass(frozen=True)
class ModelName:
    """The keys of ``[model]`` that every model has."""

    name: str = "spider"
    """Which model: spider, byte_transformer, or one that a module of job.import registers."""
    flavor: str = "debug"
    """Which of the model's sets of hyper-parameters the other keys of this section start from."""


@dataclass(frozen=True)
class ModelSection(ModelName):
    """The section ``[model]``."""

    # The empty name puts the model's own keys beside name and flavor.
    config: Annotated[Any, tyro.conf.arg(name="")] = field(kw_only=True, metadata={"key": ""})
    """Hyper-parameters, an instance of the model spec's ``config_class``."""


@dataclass(frozen=True)
class JobConfig:
    """All sections. A component is given its own section, not this object."""

    job: JobSection
    model: ModelSection
    training: TrainingConfig
    optimizer: OptimizerConfig
    lr_scheduler: LRSchedulerConfig
    parallelism: ParallelismConfig
    comm: CommConfig
    precision: PrecisionConfig
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    monitor: MonitorConfig
    validation: ValidationConfig
    profiling: ProfilingConfig

    @property
    def model_config(self) -> Any:
        """The model's hyper-parameters, an instance of ``model_spec.config_class``."""
        return self.model.config

    @property
    def model_spec(self) -> ModelSpec:
        """The spec of the chosen model."""
        return get_model_spec(self.model.name)


def load_config(arguments: Sequence[str]) -> JobConfig:
    """Reads the configuration that a command line asks for.

    Each section is checked by itself, then ``check`` compares them. ``--help`` prints all keys and leaves.

    Args:
        arguments: Of the command line, without the program.

    Raises:
        ConfigError: If the files or the command line hold a mistake.
    """
    choice = read_choice(arguments)
    path = choice.job.config_file
    file = TomlFile({}) if path is None else read_toml(Path(path), ALTERNATIVES)
    config = _drop_alternatives(_from_file(file, choice), options_given(arguments))
    config = override(config, arguments)
    check(config)
    return config


def to_toml(config: JobConfig) -> str:
    """The effective configuration as TOML that ``load_config`` reads to an equal one. Unset keys are left out.

    Raises:
        ConfigError: If a key is unset that has a default, so that leaving it out would set it.
    """
    tables = {section.name: dump(getattr(config, section.name)) for section in dataclasses.fields(config)}
    tables["model"] = {"name": config.model.name, "flavor": config.model.flavor, **dump(config.model.config)}
    text = HEADER + tomli_w.dumps(drop_unset(tables))
    again = _from_file(TomlFile(tomllib.loads(text)), Choice())
    for section in dataclasses.fields(config):
        if getattr(again, section.name) != getattr(config, section.name):
            raise ConfigError(
                f"{section.name}: one of its keys is None or NaN, which TOML cannot keep over its default; "
                f"give it a value: {getattr(config, section.name)}"
            )
    return text


def check(config: JobConfig, *, world_size: int | None = None) -> None:
    """Compares the sections with each other, before anything starts.

    Args:
        config: What ``load_config`` returned.
        world_size: Ranks of the run; default: ``num_ranks(config)``.

    Raises:
        ConfigError: If they contradict each other.
    """
    ranks = world_size if world_size is not None else num_ranks(config)
    try:
        config.parallelism.degrees(ranks)
        _check_length(config, ranks)
        _check_context(config)
        if config.validation.num_loops and config.model_spec.max_loops is None:
            raise ValueError(
                f"validation.num_loops = {list(config.validation.num_loops)} is for models that loop, and "
                f"'{config.model.name}' does not; remove it"
            )
        if config.job.time_limit is not None and not config.checkpoint.enable:
            raise ValueError("job.time_limit needs checkpoint.enable = true: a run that ends early must be saved")
        _check_waiting(config, ranks)
        activation_checkpoint.check(config.activation_checkpoint, config.compile)
    except ValueError as error:
        raise ConfigError(f"{config.job.config_file or 'defaults'} with the command line: {error}") from error


def num_ranks(config: JobConfig) -> int:
    """Ranks of the run: those that the launcher started, or those that a dry run is to imagine."""
    return int(os.environ.get("SPIDER_TITAN_DRY_RUN_RANKS" if config.job.dry_run else "WORLD_SIZE", "1"))


def _check_length(config: JobConfig, ranks: int) -> None:
    training = config.training
    if training.steps is not None and training.byte_budget is not None:
        raise ValueError("training.steps and training.byte_budget are both given; drop one, as the other follows")
    if training.steps is None and training.byte_budget is None:
        raise ValueError("neither training.steps nor training.byte_budget is given; give one")
    rows, global_rows = training.local_batch_size * ranks, training.rows_per_step(ranks)
    if global_rows % rows:
        raise ValueError(
            f"training.global_batch_size = {global_rows} is not a multiple of training.local_batch_size * ranks = "
            f"{training.local_batch_size} * {ranks} = {rows}; give {max(1, global_rows // rows) * rows}"
        )


def _check_waiting(config: JobConfig, ranks: int) -> None:
    from_hub = [name for name in config.data.used_sources if config.data.sources[name].kind == "hub"]
    if ranks > 1 and from_hub and config.data.hub_retry_seconds >= config.comm.train_timeout_seconds:
        raise ValueError(
            f"data.hub_retry_seconds = {config.data.hub_retry_seconds:g} is not below comm.train_timeout_seconds = "
            f"{config.comm.train_timeout_seconds}: while one rank tries again to read data.sources.{from_hub[0]}, the "
            "others would give up; lower the first or raise the second"
        )


def _check_context(config: JobConfig) -> None:
    longest = getattr(config.model_config, "context_length", None)
    if longest is not None and config.training.seq_len > longest:
        raise ValueError(
            f"training.seq_len = {config.training.seq_len} is above the context of model '{config.model.name}', "
            f"flavor '{config.model.flavor}', which is {longest}; give at most that"
        )


def _from_file(file: TomlFile, choice: Choice) -> JobConfig:
    sections = {name: cls for name, cls in get_type_hints(JobConfig).items() if name != "model"}
    # The model's own keys are not known before its spec is found, and the spec not before job.import is read.
    schema = Schema({**{name: [cls] for name, cls in sections.items()}, "model": [ModelName]})
    schema.require_known_sections(file)
    schema.require_known_keys(file, "job")
    job = _read_job(file, choice)
    model, spec = _choose_model(file, choice)

    schema = Schema({**{name: [cls] for name, cls in sections.items()}, "model": [ModelName, spec.config_class]})
    for name in file.values:
        schema.require_known_keys(file, name)
    given = {key: value for key, value in file.values.get("model", {}).items() if key not in annotations_of(ModelName)}
    hyper_parameters: Any = convert(
        spec.config_class, _overlay(dump(spec.flavors[model.flavor]), given), section="model", file=file
    )
    converted = {
        name: convert(cls, file.values.get(name, {}), section=name, file=file)
        for name, cls in sections.items()
        if name != "job"
    }
    return JobConfig(job=job, model=ModelSection(model.name, model.flavor, config=hyper_parameters), **converted)


def _read_job(file: TomlFile, choice: Choice) -> JobSection:
    table = file.values.get("job", {})
    for key, advice in ON_COMMAND_LINE.items():
        if key in table:
            path = file.origin(("job", key))
            raise ConfigError(f"{path}: job.{key} belongs on the command line; {advice}")
    job = convert(JobSection, table, section="job", file=file)
    job = dataclasses.replace(job, config_file=choice.job.config_file)
    modules, place = job.import_, f"{file.origin(('job', 'import'))}: job.import"
    if choice.job.imports is not None:
        modules, place = choice.job.imports, "command line: --job.import"
    for module in modules:
        _import(module, place)
    return job


def _import(module: str, place: str) -> None:
    if os.getcwd() not in sys.path:
        # Appended, so that a file there cannot hide an installed package.
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except Exception as error:  # Whatever stands in the user's module, it is theirs to mend.
        raise ConfigError(f"{place}: cannot import '{module}': {type(error).__name__}: {error}") from error


def _choose_model(file: TomlFile, choice: Choice) -> tuple[ModelName, ModelSpec]:
    keys = annotations_of(ModelName)
    table = {key: value for key, value in file.values.get("model", {}).items() if key in keys}
    model = convert(ModelName, table, section="model", file=file)
    place = {key: f"{file.origin(('model', key)) or 'defaults'}: model.{key}" for key in keys}
    for key in keys:
        value = getattr(choice.model, key)
        if value is not None:
            model = dataclasses.replace(model, **{key: value})
            place[key] = f"command line: --model.{key}"
    try:
        spec = get_model_spec(model.name)
    except ValueError as error:
        raise ConfigError(f"{place['name']}: {error}") from error
    clash = sorted(keys.keys() & annotations_of(spec.config_class).keys())
    if clash:
        raise ConfigError(
            f"{place['name']}: the config class of model '{model.name}' has a field '{clash[0]}', which is "
            "a key of every [model]; rename it"
        )
    if model.flavor not in spec.flavors:
        match = nearest(model.flavor, spec.flavors)
        hint = f"; did you mean '{match}'?" if match else ""
        known = ", ".join(spec.flavors)
        raise ConfigError(
            f"{place['flavor']}: model '{model.name}' has no flavor '{model.flavor}'; known: {known}{hint}"
        )
    return model, spec


def _overlay(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``own``, tables merged key by key."""
    merged = dict(base)
    for key, value in own.items():
        below = base.get(key)
        merged[key] = _overlay(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _drop_alternatives(config: JobConfig, options: set[str]) -> JobConfig:
    for pair in ALTERNATIVES:
        given = [path for path in pair if format_path(path) in options]
        if len(given) == 1:
            section, key = map(str, pair[1 - pair.index(given[0])])
            dropped = dataclasses.replace(getattr(config, section), **{key: None})
            config = dataclasses.replace(config, **{section: dropped})
    return config
