"""The ``[data]`` section: which documents there are, and how much of each a phase reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spider_titan.curriculum import PhaseConfig, check_phases


@dataclass(frozen=True)
class SourceConfig:
    """One ``[data.sources.NAME]``."""

    kind: Literal["builtin", "files"] = "builtin"
    """builtin: text that comes with Python and with this package. files: local files by glob."""
    part: Literal["english", "code", "multilingual"] | None = None
    """Which built-in text: Python's documentation topics, the standard library's sources, or texts in many scripts."""
    path: str | list[str] = ""
    """Glob, or list of globs, of local files; ** matches folders of any depth."""
    format: Literal["txt", "jsonl", "parquet"] | None = None
    """Format of the files; unset: by suffix. txt: a file is a document. jsonl, parquet: a record is a document."""
    text_field: str = "text"
    """Field of a jsonl or parquet record that holds the document: text, or (parquet) raw bytes."""

    def __post_init__(self) -> None:
        if self.kind == "builtin":
            if self.part is None:
                raise ValueError('part is not set: kind = "builtin" needs part = "english", "code" or "multilingual"')
            if self.path or self.format or self.text_field != "text":
                raise ValueError('path, format and text_field are for kind = "files"; remove them or change kind')
            return
        if not self.globs or not all(self.globs):
            raise ValueError('path is empty: kind = "files" needs path = "folder/*.jsonl" or a list of such globs')
        if self.part is not None:
            raise ValueError(f'part = "{self.part}" is for kind = "builtin"; remove it or change kind')
        if not self.text_field:
            raise ValueError("text_field is empty: name the field that holds the document")
        if self.format == "txt" and self.text_field != "text":
            raise ValueError(f'text_field = "{self.text_field}": txt files have no fields; remove it or change format')

    @property
    def globs(self) -> list[str]:
        """``path`` as a list."""
        return [self.path] if isinstance(self.path, str) else self.path


def _default_sources() -> dict[str, SourceConfig]:
    return {"english": SourceConfig(part="english")}


def _default_phases() -> list[PhaseConfig]:
    return [PhaseConfig(weights={"english": 1.0})]


@dataclass(frozen=True)
class DataConfig:
    """The ``[data]`` section."""

    sources: dict[str, SourceConfig] = field(default_factory=_default_sources)
    """The sources of documents by name: [data.sources.NAME]."""
    phases: list[PhaseConfig] = field(default_factory=_default_phases)
    """The curriculum: [[data.phases]] in order of 'until', each with the weights of the sources it reads."""
    max_document_bytes: int = 0
    """Longer documents are cut to this at a character boundary; the start-up lists what that drops. 0: never."""
    held_out_fraction: float = 0.02
    """Share of the documents of every source that is kept for validation and never trained on."""
    num_workers: int = 0
    """Processes that read and pack beside the trainer; 0: the trainer's own. The batches do not depend on it."""

    def __post_init__(self) -> None:
        if self.max_document_bytes < 0:
            raise ValueError(f"max_document_bytes = {self.max_document_bytes} is negative; 0 means no limit")
        if not 0.0 <= self.held_out_fraction < 1.0:
            raise ValueError(f"held_out_fraction = {self.held_out_fraction} is not in [0, 1)")
        if self.num_workers < 0:
            raise ValueError(f"num_workers = {self.num_workers} is negative; 0 means no worker process")
        check_phases(self.phases)
        for index, phase in enumerate(self.phases):
            self._check_weights(f"phases[{index}]", phase.weights)

    def _check_weights(self, key: str, weights: dict[str, float]) -> None:
        for name in weights:
            if name not in self.sources:
                known = ", ".join(sorted(self.sources)) or "none"
                raise ValueError(
                    f"{key}.weights names the source '{name}', which is not configured; add [data.sources.{name}] "
                    f"or name one of: {known}"
                )
        if not any(weights.values()):
            raise ValueError(f"{key}.weights gives no source a positive weight, so the phase has nothing to read")

    @property
    def used_sources(self) -> list[str]:
        """Names of the sources that some phase reads, sorted."""
        return sorted({name for phase in self.phases for name, weight in phase.weights.items() if weight > 0})
