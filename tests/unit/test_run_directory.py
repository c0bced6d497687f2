"""The run directory and the log file in it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spider_titan.console import LOGGER_NAME, add_log_file, setup_console
from spider_titan.run_directory import DiskError, RunDirectory, explain_disk_errors


@pytest.fixture
def run_logger() -> Iterator[logging.Logger]:
    """The package's logger; whatever a test attaches to it is taken off again."""
    logger = logging.getLogger(LOGGER_NAME)
    before, level = list(logger.handlers), logger.level
    yield logger
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()
    logger.handlers[:] = before
    logger.setLevel(level)


def finish_a_run(folder: Path, config: str) -> None:
    run = RunDirectory(folder)
    run.write_config(config)
    run.metrics_file.write_text("{}\n")
    run.log_file.write_text(f"log of {config}")
    run.close()


def test_a_new_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "outputs" / "first")
    run.write_config('[job]\ndescription = "é"\n')
    assert run.path == tmp_path / "outputs" / "first"
    assert (run.path / "config.toml").read_text(encoding="utf-8") == '[job]\ndescription = "é"\n'
    assert (run.path / "logs").is_dir()
    run.close()


def test_a_relative_path_starts_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory("outputs")
    monkeypatch.chdir("/")
    run.write_config("")
    run.close()
    assert (tmp_path / "outputs" / "config.toml").exists()


def test_earlier_runs_are_kept_whole_under_numbered_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    finish_a_run(folder, "one")
    (folder / "notes.txt").write_text("mine")
    finish_a_run(folder, "two")
    with caplog.at_level(logging.INFO, logger=LOGGER_NAME):
        finish_a_run(folder, "three")

    kept = {path.name: (path / "config.toml").read_text() for path in tmp_path.iterdir()}
    assert kept == {"run.1": "one", "run.2": "two", "run": "three"}
    assert (tmp_path / "run.1" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run.1" / "logs" / "train.log").read_text() == "log of one"
    assert len(caplog.messages) == 1
    assert str(tmp_path / "run.2") in caplog.messages[0]


@pytest.mark.parametrize("left_over", ["config.toml", "metrics.jsonl"])
def test_half_a_run_is_kept_too(tmp_path: Path, left_over: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left_over).write_text("x")
    RunDirectory(tmp_path / "run").close()
    assert (tmp_path / "run.1" / left_over).read_text() == "x"
    assert not (tmp_path / "run" / left_over).exists()


def test_a_folder_without_a_run_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run = RunDirectory(tmp_path / "run")
    assert (run.path / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    run.close()


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    finish_a_run(tmp_path / "run", "one")
    finish_a_run(tmp_path / "run", "two")
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "disk" / "run" / "config.toml").read_text() == "two"
    assert (tmp_path / "disk" / "run.1" / "config.toml").read_text() == "one"


def test_a_run_that_goes_on_is_neither_joined_nor_moved(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    with pytest.raises(ValueError, match=r"job\.dump_folder: another run is using .*run; .*another folder"):
        RunDirectory(tmp_path / "run")
    first.write_config("one")
    with pytest.raises(ValueError, match="another run is using"):
        RunDirectory(tmp_path / "run")
    assert first.config_file.read_text() == "one"
    first.close()
    RunDirectory(tmp_path / "run").close()


def test_the_current_folder_is_not_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_a_run(tmp_path / "run", "one")
    monkeypatch.chdir(tmp_path / "run" / "logs")
    with pytest.raises(ValueError, match=r"job\.dump_folder: .* current folder is in it"):
        RunDirectory("..")
    assert (tmp_path / "run" / "config.toml").read_text() == "one"


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_file_in_the_way_is_the_users_mistake(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=rf"job\.dump_folder: .*{re.escape(str(tmp_path / path))}.*name a folder"):
        RunDirectory(tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_where_no_folder_can_be_made_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match=r"job\.dump_folder: cannot write in /proc/no/run"):
        RunDirectory("/proc/no/run")


def test_only_os_errors_are_explained() -> None:
    with pytest.raises(KeyError), explain_disk_errors("x"):
        raise KeyError("k")


def test_rank_0_says_everything_on_the_console_and_in_the_file(
    tmp_path: Path, run_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_console(rank=0)
    add_log_file(tmp_path / "train.log")
    logging.getLogger("spider_titan.trainer").info("step %d", 3)
    run_logger.warning("no boundaries")
    console = capsys.readouterr().out
    assert (tmp_path / "train.log").read_text() == console
    lines = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line) for line in console.splitlines()]
    assert lines == ["step 3", "WARNING  no boundaries"]


def test_other_ranks_only_warn_and_say_who_they_are(
    run_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_console(rank=3)
    run_logger.info("step 3")
    run_logger.warning("no boundaries")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("  rank 3  WARNING  no boundaries")


def test_setting_up_again_does_not_double_lines(
    run_logger: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    setup_console()
    add_log_file(tmp_path / "first.log")
    setup_console()
    run_logger.info("once")
    assert capsys.readouterr().out.count("once") == 1
    assert (tmp_path / "first.log").read_text() == ""


def test_a_full_disk_ends_the_run_at_the_line_it_loses(
    run_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_console()
    add_log_file(Path("/dev/full"))
    with pytest.raises(DiskError, match="cannot write /dev/full: No space left on device"):
        run_logger.info("step 3")
    run_logger.error("reported")
    output = capsys.readouterr()
    assert "reported" in output.out
    assert "Traceback" not in output.err
