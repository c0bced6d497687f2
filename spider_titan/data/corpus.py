"""Real text that is there wherever Python is: the built-in corpus.

- english: Python's documentation topics (``pydoc_data.topics``);
- code: the sources of Python's standard library;
- multilingual: short texts on everyday subjects in many scripts, which come with this package.

The first two are those of the running Python, so another release of Python has a slightly different corpus. Each part
is read on first use, and has a fixed order.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

_HEADING = re.compile(r"""(?:(?<=\n\n)|\A)(?=\S.*\n([*=~^"'-])\1{2,}\n)""")
"""The place before a heading: a line of text over a line of one repeated character."""

_ENOUGH_BYTES = 1_500
"""A document of the English part ends at the first heading after this many bytes..."""
_MAX_BYTES = 4_000
"""...and before the paragraph that would take it beyond this many."""

_SKIPPED_FOLDERS = frozenset({
    # Not of the standard library.
    "site-packages", "dist-packages",
    # Tests, and generated tables.
    "test", "tests", "idle_test", "__pycache__", "encodings",
    # The text of the English part.
    "pydoc_data",
})  # fmt: skip

_TEXT_JOINT = "\n\n\n"
"""Two blank lines between the texts of a language's file; paragraphs have one."""


@functools.cache
def english() -> tuple[bytes, ...]:
    """Python's documentation topics, in documents of up to about 4 kB that end at headings or paragraphs.

    Longer topics contain many of the shorter ones, word for word. A section that has been seen is left out, so that no
    held-out document is found again inside a training document.
    """
    documents: list[bytes] = []
    seen: set[str] = set()
    for _, topic in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        sections = []
        for section in _split_before(_HEADING, topic):
            body = _without_heading(section)
            if body not in seen:
                seen.add(body)
                sections.append(section)
        documents += [document.encode() for document in _join_sections(sections)]
    return tuple(documents)


@functools.cache
def code() -> tuple[bytes, ...]:
    """The Python files of the standard library without its tests, one document a file, sorted by path.

    Empty files are left out.

    Raises:
        ValueError: If this Python has its library in an archive, not in files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    contents = (path.read_bytes() for path in sorted(_python_files(root), key=lambda path: path.parts))
    documents = tuple(content for content in contents if content)
    if not documents:
        raise ValueError(f"no Python sources under {root}: part = 'code' needs a Python with its library in files")
    return documents


@functools.cache
def multilingual() -> tuple[bytes, ...]:
    """The texts that come with this package, sorted by language; each text is a document."""
    folder = importlib.resources.files("spider_titan.data") / "texts"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    texts = [text for file in files for text in file.read_text(encoding="utf-8").split(_TEXT_JOINT)]
    return tuple((text.strip("\n") + "\n").encode() for text in texts)


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            # Folders named after a platform hold build settings of this machine.
            if path.name not in _SKIPPED_FOLDERS and path.name.isidentifier():
                yield from _python_files(path)
        elif path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path


def _split_before(pattern: re.Pattern[str], text: str) -> list[str]:
    """Splits ``text`` before every match; the pieces joined are the text."""
    starts = [match.start() for match in pattern.finditer(text)]
    ends = [0, *(start for start in starts if start), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def _without_heading(section: str) -> str:
    """The text under the heading: the same section has another underline in another topic."""
    body = section.strip()
    return body.split("\n", 2)[-1].strip() if _HEADING.match(section) else body


def _join_sections(sections: Iterable[str]) -> Iterator[str]:
    """Joins sections to documents; what is yielded, joined, is the text of all sections."""
    document, size = "", 0
    for section in sections:
        for index, paragraph in enumerate(re.split(r"(?<=\n\n)(?=\S)", section)):
            paragraph_size = len(paragraph.encode())
            if size and (size + paragraph_size > _MAX_BYTES or (index == 0 and size >= _ENOUGH_BYTES)):
                yield document
                document, size = "", 0
            document, size = document + paragraph, size + paragraph_size
    if document:
        yield document
