"""What the shell scripts do around Python: find an environment, install once, choose a launcher, pass things on.

A recorder stands in for the interpreter, so nothing is installed and no model is built; other files test whole runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = ("run_train.sh", "run_tests.sh", "scripts/environment.sh", "pyproject.toml")
SHELL_SCRIPTS = (*SCRIPTS[:3], "scripts/slurm_train.sh", ".ci/run")

RECORDER = """#!/bin/bash
# Stands in for python: records its arguments, and answers what the scripts ask of an interpreter.
case "$*" in
    *version_info*) exit "${FAKE_TOO_OLD:-0}" ;;
    *find_spec*) exit 0 ;;
    *device_count*) echo "${FAKE_DEVICES:-0}"; exit 0 ;;
    *"pip --version"*) exit 0 ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
esac
printf '%s|%s\\n' "$PWD" "$*" >>"$FAKE_RECORD"
printf '%s' "${SPIDER_TITAN_DRY_RUN_RANKS:-}" >"${FAKE_RECORD%/*}/imagined"
case "$*" in
    "-m pip install"*) exit "${FAKE_INSTALL_STATUS:-0}" ;;
    "-m venv "*) exit 0 ;;
    *) exit "${FAKE_STATUS:-0}" ;;
esac
"""


def write_executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass
class Checkout:
    """A copy of the scripts with an active environment whose Python is the recorder."""

    folder: Path
    environment: Path
    record: Path
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.folder / command[0]), *command[1:]],
            cwd=cwd or self.folder.parent,
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, cwd=cwd, **variables)
        output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def calls(self, start: str = "") -> list[str]:
        """The recorded command lines that begin with ``start``."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [line.partition("|")[2] for line in lines if line.partition("|")[2].startswith(start)]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh copy whose environment has nothing installed yet; NGPU = 1."""
    folder = tmp_path / "a checkout"
    for name in SCRIPTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    environment = tmp_path / "environment"
    write_executable(environment / "bin" / "python", RECORDER)
    record = tmp_path / "record.txt"
    variables = {
        "PATH": os.environ["PATH"],
        "VIRTUAL_ENV": str(environment),
        "FAKE_RECORD": str(record),
        "NGPU": "1",
    }
    return Checkout(folder, environment, record, variables)


def without_active_environment(checkout: Checkout, tmp_path: Path, *interpreters: str) -> dict[str, str]:
    """Variables of a shell that has only the named interpreters, all of them the recorder."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "cksum", "cp", "dirname", "flock", "mkdir", "readlink"):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    for interpreter in interpreters:
        write_executable(tools / interpreter, RECORDER)
    del checkout.variables["VIRTUAL_ENV"]
    return {"PATH": str(tools)}


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = REPOSITORY / script
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    if script != "scripts/environment.sh":
        assert os.access(path, os.X_OK)
        assert "\nset -euo pipefail\n" in path.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    result = subprocess.run(["shellcheck", "-x", *SHELL_SCRIPTS], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_default_config_file_is_the_one_of_the_repository(checkout: Checkout) -> None:
    assert checkout.run("run_train.sh", "--training.steps", "5").returncode == 0
    default = checkout.folder / "train_configs" / "debug.toml"
    assert checkout.calls("-m spider") == [f"-m spider_titan.train --job.config_file {default} --training.steps 5"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--job.config_file", "mine.toml"],
        ["--job.config_file=mine.toml"],
        ["--job.config-file", "mine.toml"],
        ["--training.steps", "5", "--job.config-file=mine.toml"],
    ],
)
def test_a_given_config_file_is_passed_on_alone(checkout: Checkout, arguments: list[str]) -> None:
    checkout.run("run_train.sh", *arguments)
    assert checkout.calls("-m spider") == [" ".join(["-m spider_titan.train", *arguments])]


def test_training_starts_in_the_callers_folder(checkout: Checkout, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    checkout.run("run_train.sh", cwd=elsewhere)
    assert checkout.record.read_text().splitlines()[-1].startswith(f"{elsewhere}|-m spider_titan.train ")


def test_a_link_to_the_script_finds_the_repository(checkout: Checkout, tmp_path: Path) -> None:
    link = tmp_path / "train"
    link.symlink_to(checkout.folder / "run_train.sh")
    assert subprocess.run([str(link)], env=checkout.variables, capture_output=True).returncode == 0
    assert f"--job.config_file {checkout.folder}/train_configs/debug.toml" in checkout.calls("-m spider")[0]


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("status", [0, 2, 75])
def test_exit_status_is_passed_on(checkout: Checkout, processes: str, status: int) -> None:
    assert checkout.run("run_train.sh", NGPU=processes, FAKE_STATUS=str(status)).returncode == status


def test_more_processes_than_one_go_through_the_launcher(checkout: Checkout) -> None:
    checkout.run("run_train.sh", "--job.config_file", "mine.toml", NGPU="3")
    assert checkout.calls("-m spider") == [
        "-m spider_titan.launch --nproc-per-node 3 --max-restarts 0 -- --job.config_file mine.toml"
    ]


def test_one_process_that_may_start_again_goes_through_the_launcher(checkout: Checkout) -> None:
    checkout.run("run_train.sh", "--job.config_file", "mine.toml", MAX_RESTARTS="2")
    assert checkout.calls("-m spider") == [
        "-m spider_titan.launch --nproc-per-node 1 --max-restarts 2 -- --job.config_file mine.toml"
    ]


@pytest.mark.parametrize("option", ["--job.dry_run", "--job.dry-run"])
def test_a_dry_run_is_one_process_that_knows_how_many_to_imagine(checkout: Checkout, option: str) -> None:
    result = checkout.run("run_train.sh", "--job.config_file", "m.toml", option, NGPU="64", NNODES="4")
    assert result.returncode == 0, "no node rank and no master is asked for"
    assert checkout.calls("-m spider") == [f"-m spider_titan.train --job.config_file m.toml {option}"]
    assert (checkout.record.parent / "imagined").read_text() == "256"


def test_help_is_printed_once(checkout: Checkout) -> None:
    checkout.run("run_train.sh", "--job.config_file", "m.toml", "--help", NGPU="4")
    assert checkout.calls("-m spider") == ["-m spider_titan.train --job.config_file m.toml --help"]


def test_several_nodes_meet_at_the_master(checkout: Checkout) -> None:
    checkout.run("run_train.sh", "--job.config_file", "m.toml", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert checkout.calls("-m spider") == [
        "-m spider_titan.launch --nproc-per-node 1 --max-restarts 0 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1"
        " --master-port 29500 -- --job.config_file m.toml"
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NGPU": "0"}, "NGPU=0: give a whole number of at least 1"),
        ({"NGPU": "two"}, "NGPU=two: give a whole number"),
        ({"NNODES": "-1"}, "NNODES=-1: give a whole number"),
        ({"MAX_RESTARTS": "some"}, "MAX_RESTARTS=some: give a whole number of at least 0"),
        ({"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}, "NODE_RANK=: give a whole number of at least 0"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES=2 needs MASTER_ADDR"),
    ],
)
def test_wrong_numbers_are_the_users_mistake(checkout: Checkout, variables: dict[str, str], message: str) -> None:
    result = checkout.run("run_train.sh", **variables)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert checkout.calls("-m spider") == []


@pytest.mark.parametrize(("devices", "launcher"), [("0", "-m spider_titan.train"), ("4", "-m spider_titan.launch")])
def test_processes_default_to_the_cuda_devices(checkout: Checkout, tmp_path: Path, devices: str, launcher: str) -> None:
    write_executable(tmp_path / "driver" / "nvidia-smi", "#!/bin/bash\n")
    del checkout.variables["NGPU"]
    path = f"{tmp_path / 'driver'}:{os.environ['PATH']}"
    checkout.run("run_train.sh", PATH=path, FAKE_DEVICES=devices)
    (call,) = checkout.calls("-m spider")
    assert call.startswith(launcher)
    assert ("--nproc-per-node 4" in call) == (devices == "4")


def test_the_active_environment_gets_the_package_once_and_says_so(checkout: Checkout) -> None:
    first = checkout.run("run_train.sh")
    second = checkout.run("run_train.sh")
    install = f"-m pip install --quiet --quiet --disable-pip-version-check --editable {checkout.folder}[dev]"
    assert checkout.calls("-m pip install") == [install]
    assert f"installing spider-titan and its dependencies into {checkout.environment}" in first.stderr
    assert second.stderr == ""


def test_a_changed_pyproject_installs_again(checkout: Checkout) -> None:
    checkout.run("run_train.sh")
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    checkout.run("run_train.sh")
    checkout.run("run_train.sh")
    assert len(checkout.calls("-m pip install")) == 2


def test_an_environment_of_another_checkout_is_installed_into_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("run_train.sh")
    other = tmp_path / "other"
    shutil.copytree(checkout.folder, other)
    Checkout(other, checkout.environment, checkout.record, checkout.variables).run("run_train.sh")
    assert [call.rpartition(" ")[2] for call in checkout.calls("-m pip install")] == ["checkout[dev]", f"{other}[dev]"]


def test_a_failed_installation_stops_and_is_tried_again(checkout: Checkout) -> None:
    failed = checkout.run("run_train.sh", FAKE_INSTALL_STATUS="1")
    assert failed.returncode == 1
    assert f"could not install into {checkout.environment}" in failed.stderr
    assert checkout.calls("-m spider") == []
    assert checkout.run("run_train.sh").returncode == 0
    assert len(checkout.calls("-m pip install")) == 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_first_runs_at_the_same_time_install_once(checkout: Checkout) -> None:
    processes = [checkout.start("run_train.sh") for _ in range(4)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert len(checkout.calls("-m pip install")) == 1
    assert len(checkout.calls("-m spider")) == 4


def test_without_an_environment_one_is_made_once(checkout: Checkout, tmp_path: Path) -> None:
    variables = without_active_environment(checkout, tmp_path, "python3")
    # The recorder answers for pip as soon as there is an interpreter, as a created environment does.
    results = [checkout.run("run_train.sh", **variables) for _ in range(2)]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    own = checkout.folder / ".venv"
    assert checkout.calls("-m venv") == [f"-m venv {own}"]
    assert len(checkout.calls("-m pip install")) == 1
    assert f"creating the virtual environment {own} with python3" in results[0].stderr


def test_a_python_that_is_too_old_is_named_clearly(checkout: Checkout, tmp_path: Path) -> None:
    variables = without_active_environment(checkout, tmp_path, "python3", "python3.11")
    result = checkout.run("run_train.sh", **variables, FAKE_TOO_OLD="1")
    assert result.returncode == 2
    assert "no Python 3.11 or later on PATH" in result.stderr
    assert checkout.calls() == []


def test_an_active_environment_that_is_too_old_is_named_clearly(checkout: Checkout) -> None:
    result = checkout.run("run_train.sh", FAKE_TOO_OLD="1")
    assert result.returncode == 2
    assert f"{checkout.environment} has a Python older than 3.11" in result.stderr


def test_an_active_environment_that_is_gone_is_named_clearly(checkout: Checkout) -> None:
    shutil.rmtree(checkout.environment)
    result = checkout.run("run_train.sh")
    assert result.returncode == 2
    assert f"{checkout.environment} has no bin/python" in result.stderr


def test_tests_run_in_the_repository_with_the_given_arguments(checkout: Checkout) -> None:
    result = checkout.run("run_tests.sh", "tests/unit", "-k", "a and b", FAKE_STATUS="5")
    assert result.returncode == 5
    assert checkout.record.read_text().splitlines()[-1] == f"{checkout.folder}|-m pytest tests/unit -k a and b"


def test_the_slurm_script_is_for_sbatch_in_the_repository(tmp_path: Path) -> None:
    for variables in ({}, {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        result = subprocess.run(
            [str(REPOSITORY / "scripts" / "slurm_train.sh")],
            cwd=REPOSITORY,
            env={**environment, **variables},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2
        assert "submit this script with sbatch, from the folder of the repository" in result.stderr
