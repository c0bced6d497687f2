"""The configuration: precedence, extends, strictness, errors and the effective file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from spider_titan.config import ConfigError, JobConfig, ModelName, load_config, to_toml
from spider_titan.toml_file import read_toml

CONFIGS = Path(__file__).parents[2] / "train_configs"

MINIMAL = """
[training]
steps = 700
[lr_scheduler]
warmup_steps = 20
"""

USER_MODEL = """
from dataclasses import dataclass
from spider_titan.spec import ModelSpec, register_model_spec

@dataclass(frozen=True)
class Size:
    width: int = 8
    '''Units.'''

@dataclass(frozen=True)
class Config:
    depth: int = 1
    '''Layers.'''
    dropout: float | None = 0.5
    '''Share of units.'''
    size: Size = Size()
    '''Sizes.'''

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(f"depth = {self.depth} must be at least 1")

def unused(*arguments):
    raise AssertionError("reading a configuration builds nothing")

register_model_spec(ModelSpec(
    name="NAME", config_class=Config, flavors={"small": Config(), "deep": Config(depth=9, size=Size(width=64))},
    construct=unused, init_weights=unused, blocks=unused, param_groups=unused, loss=unused, metrics=unused,
    flops_per_byte=unused, parameter_counts=unused, after_step=unused,
))
"""


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def load(path: Path, *arguments: str) -> JobConfig:
    return load_config(["--job.config_file", str(path), *arguments])


def error_of(path: Path, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module in the current folder that registers a model of its own name; models stay registered for good."""
    name = "user_model_" + re.sub(r"\W", "_", request.node.name)
    write(tmp_path, USER_MODEL.replace("NAME", name), f"{name}/__init__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


# Precedence


def test_command_line_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "[optimizer]\nlr = 0.5\nbeta1 = 0.5\n")
    config = load(path, "--optimizer.lr", "0.25")
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (0.25, 0.5, 0.95)


def test_model_keys_start_from_the_flavor(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + '[model]\nflavor = "100m"\nnum_loops = 7\n')
    config = load(path)
    flavor = config.model_spec.flavors["100m"]
    assert config.model_config == dataclasses.replace(flavor, num_loops=7)
    other = load(path, "--model.flavor", "debug", "--model.num_experts", "4")
    expected = dataclasses.replace(config.model_spec.flavors["debug"], num_loops=7, num_experts=4)
    assert (other.model.flavor, other.model_config) == ("debug", expected)


def test_spellings_of_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    config = load(
        path, "--training.local-batch-size=2", "--metrics.no-enable_tensorboard", "--validation.enable", "False"
    )
    assert config.training.local_batch_size == 2
    assert not config.metrics.enable_tensorboard
    assert not config.validation.enable
    again = load(write(tmp_path, to_toml(config)), "--metrics.enable_tensorboard", "--validation.enable=true")
    assert again.metrics.enable_tensorboard
    assert again.validation.enable


def test_command_line_reaches_sources_and_phases_of_the_file(tmp_path: Path) -> None:
    config = load(
        CONFIGS / "spider_10b.toml", "--data.sources.code.path", "x/*", "--data.phases.1.weights.english", "9"
    )
    assert config.data.sources["code"].path == "x/*"
    assert (config.data.sources["math"].path, config.data.sources["math"].name) == ("", "finemath-4plus")
    assert config.data.phases[1].weights == {"english": 9.0, "multilingual": 0.3}


def test_steps_on_the_command_line_replace_a_byte_budget_of_the_file(tmp_path: Path) -> None:
    config = load(CONFIGS / "spider_10b.toml", "--training.steps", "500")
    assert (config.training.steps, config.training.byte_budget) == (500, None)
    child = write(tmp_path, 'extends = "base.toml"\n[training]\nbyte_budget = 10_000_000\n')
    write(tmp_path, MINIMAL, "base.toml")
    assert (load(child).training.steps, load(child).training.byte_budget) == (None, 10_000_000)


# extends


def test_extends_merges_tables_and_replaces_arrays(tmp_path: Path) -> None:
    write(
        tmp_path,
        MINIMAL
        + """
        [optimizer]
        lr = 0.5
        beta1 = 0.5
        [data.sources.a]
        part = "english"
        [[data.phases]]
        until = 0.5
        weights = { a = 1 }
        [[data.phases]]
        weights = { a = 1 }
        """,
        "base/root.toml",
    )
    write(tmp_path, 'extends = "root.toml"\n[optimizer]\nlr = 0.25\nbeta2 = 0.25\n', "base/middle.toml")
    top = """
        extends = "base/middle.toml"
        [optimizer]
        beta2 = 0.125
        [data.sources.b]
        part = "code"
        [[data.phases]]
        weights = { b = 1 }
        """
    config = load(write(tmp_path, top))
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (0.25, 0.5, 0.125)
    assert sorted(config.data.sources) == ["a", "b"]
    assert [phase.weights for phase in config.data.phases] == [{"b": 1.0}]


def test_extends_in_a_circle_shows_the_chain(tmp_path: Path) -> None:
    first = write(tmp_path, 'extends = "two.toml"', "one.toml")
    write(tmp_path, 'extends = "three.toml"', "two.toml")
    write(tmp_path, 'extends = "one.toml"', "three.toml")
    names = re.findall(r"(\w+\.toml)", error_of(first).partition("circle: ")[2])
    assert names == ["one.toml", "two.toml", "three.toml", "one.toml"]


def test_missing_files_are_named_with_who_asked_for_them(tmp_path: Path) -> None:
    assert re.search(r"job.config_file: cannot read '.*nowhere.toml'", error_of(tmp_path / "nowhere.toml"))
    path = write(tmp_path, 'extends = "nowhere.toml"')
    assert re.search(r"run.toml: extends: cannot read '.*nowhere.toml'", error_of(path))
    assert "extends should be the path of one TOML file" in error_of(write(tmp_path, "extends = [1]"))


def test_origin_is_the_file_that_set_the_value(tmp_path: Path) -> None:
    base = write(tmp_path, "[a]\nx = 1\ny = 1\n[b]\nz = 1\n", "base.toml")
    top = write(tmp_path, 'extends = "base.toml"\n[a]\ny = 2\n')
    file = read_toml(top)
    assert file.values == {"a": {"x": 1, "y": 2}, "b": {"z": 1}}
    assert [file.origin(path) for path in (("a", "x"), ("a", "y"), ("b", "z"))] == [base, top, base]
    assert file.origin_of_table(("a",)) == top
    assert file.origin_of_table(("b",)) == base


# Strictness of files

WRONG_FILES = [
    ("[training]\nstepz = 1", r"run.toml: \[training\] has no key 'stepz'; did you mean 'steps'\?"),
    ("[training]\nlocal-batch-size = 1", r"run.toml: \[training\] has no key 'local-batch-size'; .*'local_batch_size'"),
    (
        "[optimizer]\nwarmup_steps = 1",
        r"run.toml: \[optimizer\] has no key 'warmup_steps'; it belongs to \[lr_scheduler\]",
    ),
    ("[training]\nexpert_rank = 8", r"run.toml: \[training\] has no key 'expert_rank'; it belongs to \[model\]"),
    ("[model]\nnum_loop = 1", r"run.toml: \[model\] has no key 'num_loop'; did you mean 'num_loops'\?"),
    ("[model]\nflavour = 'debug'", r"run.toml: \[model\] has no key 'flavour'; did you mean 'flavor'\?"),
    ("[job]\nimports = 'x'", r"run.toml: \[job\] has no key 'imports'; did you mean 'import'\?"),
    ("[job]\nextends = 'x'", r"run.toml: \[job\] has no key 'extends'; it belongs to the top"),
    ("[job]\nconfig_file = 'x'", r"run.toml: job.config_file belongs on the command line"),
    ("[trainig]\nsteps = 1", r"run.toml: no section is called 'trainig'; did you mean 'training'\?"),
    ("steps = 1", r"run.toml: no section is called 'steps'; it belongs to \[training\]"),
    ("training = 1", r"run.toml: training should be a table \[training\], got 1"),
    ("[training]\nsteps = true", r"run.toml: training.steps should be a valid integer, got true"),
    ("[training]\nsteps = 1.0", r"run.toml: training.steps should be a valid integer, got 1.0"),
    ("[training]\nsteps = 1979-05-27", r"run.toml: training.steps should be a valid integer, got \"1979-05-27\""),
    ("[optimizer]\nlr = '1e-3'", r"run.toml: optimizer.lr should be a valid number, got \"1e-3\""),
    ("[optimizer]\nlr = true", r"run.toml: optimizer.lr should be a valid number, got true"),
    ("[optimizer]\nlr = -1", r"run.toml: optimizer: lr = -1.0 must be above 0"),
    ("[metrics]\nenable_tensorboard = 1", r"run.toml: metrics.enable_tensorboard should be a valid boolean, got 1"),
    ("[metrics]\nlog_freq = 0", r"run.toml: metrics: log_freq = 0"),
    (
        "[precision]\nmode = 'fp12'",
        r"run.toml: precision.mode should be 'auto', 'fp32', 'bf16', 'fp8_dynamic', 'mxfp8' or 'nvfp4', got \"fp12\"",
    ),
    ("[model]\nname = 1", r"run.toml: model.name should be a valid string, got 1"),
    ("[model]\nengram_orders = [3, 'x']", r"run.toml: model.engram_orders\[1\] should be a valid integer, got \"x\""),
    ("[model]\nnum_loops = 0", r"run.toml: model: .*num_loops"),
    ("[data.sources.a]\npat = 'x'", r"run.toml: \[data.sources.a\] has no key 'pat'; did you mean 'path'\?"),
    ("[data.sources.a]\nuntil = 1", r"run.toml: \[data.sources.a\] has no key 'until'; it belongs to \[data.phases\]"),
    ("[data.sources.a]\npath = 3", r"run.toml: data.sources.a.path should be a valid string or a valid array, got 3"),
    ("[data.sources.a]\nkind = 'files'", r"run.toml: data.sources.a: path is empty"),
    ("[data.sources]\na = 1", r"run.toml: data.sources.a should be .*, got 1"),
    (
        "[[data.phases]]\n[[data.phases]]\nuntl = 1",
        r"run.toml: \[data.phases\[1\]\] has no key 'untl'; did you mean 'until'\?",
    ),
    ("[[data.phases]]\n[[data.phases]]\nuntil = 'x'", r"run.toml: data.phases\[1\].until should be a valid number"),
    ("[[data.phases]]\n[[data.phases]]\nuntil = 2", r"run.toml: data.phases\[1\]: until = 2.0 is not in"),
    (
        "[[data.phases]]\nweights = { english = 'x' }",
        r"run.toml: data.phases\[0\].weights.english should be a valid number",
    ),
    ("[[data.phases]]\nweights = { englsh = 1 }", r"run.toml: data: .*phases\[0\].weights names the source 'englsh'"),
    ("[[data.phases]]\nweights = { english = 0 }", r"run.toml: data: .*phases\[0\].weights gives no source a positive"),
    ("[[data.phases]]\nuntil = 0.5\nweights = { english = 1 }", r"run.toml: data: .*last phase must have until = 1.0"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert re.search(re.escape(str(tmp_path)) + "/" + message, error_of(path))


def test_whole_number_stands_for_a_float(tmp_path: Path) -> None:
    lr = load(write(tmp_path, MINIMAL + "[optimizer]\nlr = 1\n")).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_infinity_survives_the_effective_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), "--training.max_norm", "inf")
    assert load(write(tmp_path, to_toml(config))).training.max_norm == float("inf")


def test_mistake_in_an_extended_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, "[training]\nsteps = 'x'\nstepz = 1\n", "base.toml")
    top = write(tmp_path, 'extends = "base.toml"\n[training]\nstepz = 2\n')
    assert error_of(top).startswith(f"{tmp_path}/run.toml: [training] has no key 'stepz'")
    write(tmp_path, "[training]\nsteps = 'x'\n", "base.toml")
    top = write(tmp_path, 'extends = "base.toml"\n[training]\nseed = 2\n')
    assert error_of(top).startswith(f"{tmp_path}/base.toml: training.steps should be")


def test_not_toml_names_file_and_line(tmp_path: Path) -> None:
    assert re.search(
        r"run.toml: not valid TOML: .*line 3", error_of(write(tmp_path, "[training]\nsteps = 1\nseed =\n"))
    )
    path = tmp_path / "run.toml"
    path.write_bytes(b"[training]\n# \xff\n")
    assert "run.toml: not valid TOML: byte 13 is not UTF-8" in error_of(path)


# Strictness of the command line

WRONG_COMMAND_LINES = [
    ("--training.stepz 3", r"no option --training.stepz; did you mean --training.steps\?"),
    ("--trainin.steps 3", r"no option --trainin.steps; 'steps' belongs to --training.steps"),
    ("--steps 3", r"no option --steps; 'steps' belongs to --training.steps"),
    ("--optimizer.warmup-steps=3", r"no option --optimizer.warmup_steps; .* belongs to --lr_scheduler.warmup_steps"),
    ("--model.num_loop 3", r"no option --model.num_loop; did you mean --model.num_loops\?"),
    ("--data.sources.english.pat x", r"no option .*pat; did you mean --data.sources.english.path\?"),
    ("--training.steps x", r"--training.steps: .*'x'"),
    ("--training.steps 1.5", r"--training.steps: .*'1.5'"),
    ("--training.steps true", r"--training.steps: .*'true'"),
    ("--training.steps 3 4", r"'4' belongs to no option"),
    ("--training.steps", r"--training.steps.* Expected 1 value"),
    ("--optimizer.lr x", r"--optimizer.lr: .*'x'"),
    ("--optimizer.lr -1", r"optimizer: lr = -1.0 must be above 0"),
    ("--precision.mode fp12", r"'fp12' .*--precision.mode.*'fp32', 'bf16'"),
    ("--validation.enable=maybe", r"--validation.enable should be True or False, got 'maybe'"),
    ("--model.num_loops 0", r"model: .*num_loops"),
    ("--model.flavor", r"--model.flavor.* Expected 1 value"),
    ("--model.flavor dbug", r"--model.flavor: model 'spider' has no flavor 'dbug'; known: .*did you mean 'debug'\?"),
    ("--model.name spidr", r"--model.name: no model spec named 'spidr'; known: byte_transformer, .*spider"),
    ("--job.import no_such_module", r"--job.import: cannot import 'no_such_module': ModuleNotFoundError"),
    ("steps", r"'steps' belongs to no option"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_COMMAND_LINES)
def test_wrong_command_line_is_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MINIMAL)
    assert re.match("command line: .*" + message, error_of(path, *arguments.split()))
    assert capsys.readouterr().err == ""


def field_docstrings(config_class: type) -> dict[str, str | None]:
    """Field -> the string literal under it, read from the source."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(definition, ast.ClassDef)
    docstrings: dict[str, str | None] = {}
    for statement, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            literal = below.value if isinstance(below, ast.Expr) else None
            docstrings[statement.target.id] = str(literal.value) if isinstance(literal, ast.Constant) else None
    return docstrings


def test_help_shows_every_key_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    config = load(CONFIGS / "debug.toml")
    with pytest.raises(SystemExit) as left:
        load(CONFIGS / "debug.toml", "--help")
    assert not left.value.code
    shown = "".join(re.sub(r"[│\s]", "", line) for line in capsys.readouterr().out.splitlines())
    classes = {section.name: type(getattr(config, section.name)) for section in dataclasses.fields(JobConfig)}
    tables: list[tuple[str, type]] = [*classes.items(), ("model", ModelName), ("model", type(config.model_config))]
    for table, config_class in tables:
        for name, docstring in field_docstrings(config_class).items():
            assert docstring, f"{config_class.__name__}.{name} has no docstring"
            if (table, name) not in (("model", "config"), ("data", "sources"), ("data", "phases")):
                assert f"--{table}.{name.rstrip('_')}" in shown
                assert re.sub(r"\s", "", docstring) in shown


# Models of users


def test_file_imports_a_model_from_the_current_folder(tmp_path: Path, user_module: str) -> None:
    model = f'[model]\nname = "{user_module}"\nflavor = "deep"\nsize = {{ width = 3 }}\n'
    config = load(write(tmp_path, f'{MINIMAL}[job]\nimport = "{user_module}"\n{model}'))
    assert config.job.import_ == [user_module]
    assert (config.model_config.depth, config.model_config.size.width) == (9, 3)
    assert load(write(tmp_path, to_toml(config), "again.toml")) == config


def test_command_line_imports_a_model(tmp_path: Path, user_module: str) -> None:
    path = write(tmp_path, MINIMAL)
    chosen = ("--job.import", user_module, "--model.name", user_module, "--model.flavor", "small")
    config = load(path, *chosen, "--model.depth", "4", "--model.size.width", "5")
    assert (config.model_config.depth, config.model_config.size.width) == (4, 5)
    assert tomllib.loads(to_toml(config))["job"]["import"] == [user_module]
    assert "command line: model: depth = 0 must be at least 1" in error_of(path, *chosen, "--model.depth", "0")
    other = load(path, *chosen[:2], "--model.num_loops", "1")
    assert other.model.name == "spider"


def test_unset_key_that_has_a_default_cannot_be_kept(tmp_path: Path, user_module: str) -> None:
    chosen = ("--job.import", user_module, "--model.name", user_module, "--model.flavor", "small")
    config = load(write(tmp_path, MINIMAL), *chosen, "--model.dropout", "None")
    with pytest.raises(ConfigError, match=r"^model: one of its keys is None"):
        to_toml(config)


def test_model_key_that_every_model_has_is_refused(tmp_path: Path, user_module: str) -> None:
    module = tmp_path / user_module / "__init__.py"
    module.write_text(module.read_text().replace("depth: int = 1", "flavor: str = ''\n    depth: int = 1"))
    message = error_of(write(tmp_path, MINIMAL), "--job.import", user_module, "--model.name", user_module)
    assert re.match(r"command line: --model.name: the config class .* has a field 'flavor'.* rename it", message)


def test_failing_import_names_file_and_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "raise ZeroDivisionError('one\\ntwo')", "user_model_that_fails.py")
    path = write(tmp_path, '[job]\nimport = ["user_model_that_fails"]\n')
    expected = "run.toml: job.import: cannot import 'user_model_that_fails': ZeroDivisionError: one two"
    assert expected in error_of(path)


def test_unknown_model_and_flavor_name_the_file(tmp_path: Path) -> None:
    assert "run.toml: model.name: no model spec named 'x'" in error_of(write(tmp_path, '[model]\nname = "x"'))
    message = error_of(write(tmp_path, '[model]\nflavor = "100"'))
    assert "run.toml: model.flavor: model 'spider' has no flavor '100'; known: debug, 100m, 10b" in message
    assert "did you mean '100m'?" in message


# The effective configuration and the shipped files


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_file_reloads_from_its_effective_form(path: Path, tmp_path: Path) -> None:
    config = load(path, "--training.seed", "5")
    text = to_toml(config)
    assert "extends" not in tomllib.loads(text)
    again = load(write(tmp_path, text))
    assert again == config
    assert to_toml(again) == text


def test_there_are_shipped_files() -> None:
    assert {"debug", "spider_100m", "spider_10b", "byte_transformer_debug"} <= {p.stem for p in CONFIGS.glob("*.toml")}


# Sections against each other

CONTRADICTIONS = [
    ({}, "--training.byte_budget 5 --training.steps 500", "training.steps and training.byte_budget are both given"),
    ({}, "--training.steps None", "neither training.steps nor training.byte_budget is given"),
    ({}, "--training.global_batch_size 6", "global_batch_size = 6 is not a multiple of .* 4 \\* 1 = 4"),
    (
        {"WORLD_SIZE": "3"},
        "--training.global_batch_size 8",
        "global_batch_size = 8 is not a multiple of .* 4 \\* 3 = 12",
    ),
    ({}, "--training.seq_len 4097", "training.seq_len = 4097 is above the context of model 'spider', .* 4096"),
]


@pytest.mark.parametrize(("environment", "arguments", "message"), CONTRADICTIONS)
def test_contradiction_is_refused(
    environment: dict[str, str], arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.match(
        rf"{re.escape(str(tmp_path))}/run.toml.*: .*{message}", error_of(write(tmp_path, MINIMAL), *arguments.split())
    )


def test_what_just_agrees_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    path = write(tmp_path, MINIMAL)
    assert load(path, "--training.global_batch_size", "24").training.global_batch_size == 24
    assert load(path, "--training.seq_len", "4096").training.seq_len == 4096


def test_both_lengths_in_one_file_are_refused(tmp_path: Path) -> None:
    assert "are both given" in error_of(write(tmp_path, "[training]\nsteps = 500\nbyte_budget = 5\n"))
