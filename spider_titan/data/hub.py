"""Hub datasets as a source: their parquet files, block by block, over HTTP.

The library ``datasets`` says which files a configuration and a split have, at which commit. They are read by our own
code in ranges of bytes, a row group's column at a time. Code that comes with a dataset is never run.

What may pass, a busy hub or a lost connection, is tried again ever more slowly for ``data.hub_retry_seconds``.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable
from typing import IO, TypeVar, cast

import datasets
import huggingface_hub
import pyarrow as pa
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from spider_titan.data.config import SourceConfig
from spider_titan.data.documents import Settings
from spider_titan.data.parquet_blocks import BlockSource, ParquetFiles
from spider_titan.data.problems import BadRecords, SourceError

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds between the first two tries, and at most; each delay is twice the one before."""

_TIMEOUT = 30.0

_PASSING_STATUS = (408, 425, 429)
"""Beside 5xx."""

_TAIL_BYTES = 2**16
"""Read first of a file: its end has the footer, and the reply says how long the file is."""


_COPIED_BYTES = 2**26
"""Bytes of a download that are asked for at once."""


class Retry:
    """Calls what it is given until it works or a time is over.

    Args:
        source: Name in ``[data.sources]``, for errors.
        seconds: How long after the first failure another try may begin.
    """

    def __init__(self, source: str, seconds: float) -> None:
        self._source, self._seconds = source, seconds

    def __call__(self, action: Callable[[], T]) -> T:
        """Returns what ``action`` returns.

        Raises:
            SourceError: If it failed in a way that will not pass, or too long.
        """
        begin: float | None = None
        delay = FIRST_DELAY
        while True:
            try:
                return action()
            except (HTTPError, OSError, pa.ArrowException) as error:
                begin = begin or time.monotonic()
                waited = time.monotonic() - begin
                if not _may_pass(error) or waited + delay > self._seconds:
                    raise SourceError(
                        f"data.sources.{self._source}: the hub failed, tried for {waited:.0f} s "
                        f"(data.hub_retry_seconds = {self._seconds:g}): {_one_line(error)}"
                    ) from error
                logger.warning(
                    "data.sources.%s: the hub failed, trying again in %g s: %s", self._source, delay, _one_line(error)
                )
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)


class RangeFile(io.RawIOBase):
    """A file behind a URL, read in ranges.

    Args:
        url: That answers range requests.
        size: Of the file; None: it is asked for, together with the end of the file.
    """

    def __init__(self, url: str, size: int | None = None) -> None:
        super().__init__()
        self._url = url
        self._position = 0
        self._tail = b""
        if size is None:
            self._tail, total = self._get(f"bytes=-{_TAIL_BYTES}")
            size = len(self._tail) if total is None else total
        self.size = size
        """Bytes of the whole file."""

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file; asks for nothing."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Returns ``size`` bytes, fewer only at the end of the file.

        Raises:
            OSError: If the reply has another number of bytes than was asked for.
        """
        left = max(0, self.size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        begin, end = self._position, self._position + count
        tail_begin = self.size - len(self._tail)
        if begin >= tail_begin or not count:
            data = self._tail[begin - tail_begin : end - tail_begin] if count else b""
        else:
            data, _ = self._get(f"bytes={begin}-{end - 1}")
        if len(data) != count:
            raise OSError(f"{self._url} was cut off: {len(data):,} bytes of {count:,}")
        self._position = end
        return data

    def _get(self, range_: str) -> tuple[bytes, int | None]:
        """The bytes of a range, and the length of the whole file where the reply says it."""
        headers = {**build_hf_headers(), "Range": range_}
        reply = huggingface_hub.get_session().get(self._url, headers=headers, timeout=_TIMEOUT, follow_redirects=True)
        hf_raise_for_status(reply)
        total = reply.headers.get("Content-Range", "").rpartition("/")[2]
        return reply.content, int(total) if total.isdigit() else None


class RangeFiles:
    """Opens URLs; the size of each is asked for once."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def open(self, url: str) -> IO[bytes]:
        """The file behind ``url``."""
        file = RangeFile(url, self._sizes.get(url))
        self._sizes[url] = file.size
        return cast(IO[bytes], file)


def download(url: str, path: str) -> None:
    """Copies the file behind ``url`` to ``path``, which is overwritten."""
    file = RangeFile(url)
    with open(path, "wb") as copy:
        while block := file.read(_COPIED_BYTES):
            copy.write(block)


def open_hub(
    name: str, config: SourceConfig, settings: Settings, bad_records: BadRecords, *, retry_seconds: float
) -> BlockSource:
    """Opens a hub dataset: asks for its list of files, and reads none.

    Args:
        name: The source's name in ``[data.sources]``, for errors.
        config: Its configuration, of kind ``hub``.
        settings: The held-out share and the rest.
        bad_records: Is told of records that hold no document.
        retry_seconds: How long a failing hub is asked again.

    Raises:
        SourceError: If the hub fails, there is no such dataset, configuration or split, or its files are not parquet.
    """
    if not sys.stderr.isatty():
        # Bars are for people.
        datasets.disable_progress_bars()
    retry = Retry(name, retry_seconds)
    commit, urls = retry(lambda: list_files(name, config))
    others = [url for url in urls if not url.endswith(".parquet")]
    if others:
        raise SourceError(
            f"data.sources.{name}: {config.dataset} has files that are not parquet, such as {others[0]}; make a local "
            f"copy with python -m spider_titan.tools.prepare and read that"
        )
    # Unbuffered on our side: the parquet reader asks for a whole column of a row group at once.
    files = ParquetFiles(urls, config.text_field, RangeFiles().open, retry)
    origin = f"hub dataset {config.dataset} at {commit}, split {config.split}"
    return BlockSource(name, files, settings, bad_records, origin=origin)


def list_files(name: str, config: SourceConfig) -> tuple[str, list[str]]:
    """The commit of a hub dataset and the URLs of the files of its configurations and split, in the dataset's order.

    Raises:
        SourceError: If there is no such configuration or split.
    """
    commit, urls = "", []
    for configuration in config.names:
        try:
            builder = datasets.load_dataset_builder(config.dataset, configuration, revision=config.revision)
        except (ValueError, RuntimeError) as error:
            # Also for a dataset that is a program.
            raise SourceError(f"data.sources.{name}: {config.dataset} cannot be used: {_one_line(error)}") from error
        files = builder.config.data_files or {}
        if config.split not in files:
            known = ", ".join(map(str, files)) or "none"
            raise SourceError(
                f"data.sources.{name}.split: {config.dataset} has no split '{config.split}'; there are: {known}"
            )
        for path in files[config.split]:
            repository, _, rest = str(path).removeprefix("hf://datasets/").partition("@")
            commit, _, file = rest.partition("/")
            urls.append(huggingface_hub.hf_hub_url(repository, file, repo_type="dataset", revision=commit))
    return commit, urls


def _may_pass(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    return not isinstance(error, FileNotFoundError | PermissionError | pa.ArrowException)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
