"""The ``[data]`` section: which documents there are, and how much of each a phase reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from spider_titan.curriculum import PhaseConfig, check_phases

Kind = Literal["builtin", "files", "hub", "own"]
Markers = Literal["image", "audio", "video", "auto"]

_KEYS_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "builtin": ("part",),
    "files": ("path", "format", "text_field", "in_place", "markers"),
    "hub": ("dataset", "name", "split", "revision", "path", "format", "text_field", "in_place", "markers"),
    "own": ("opener", "options", "markers"),
}
"""The keys that only some kinds read."""


@dataclass(frozen=True)
class SourceConfig:
    """One ``[data.sources.NAME]``."""

    kind: Literal["builtin", "files", "hub", "own"] = "builtin"
    """builtin: text that comes with Python and this package. files: local. hub: Hugging Face. own: of job.import."""
    part: Literal["english", "code", "multilingual", "math", "multimodal"] | None = None
    """Which built-in part: Python's documentation, its library, many scripts, sums, or small images and sounds."""
    path: str | list[str] = ""
    """Glob, or list of globs, of local files; ** matches folders of any depth. For hub: read these in its place."""
    format: Literal["txt", "jsonl", "parquet", "bytes"] | None = None
    """Format of the files; unset: by suffix. txt, bytes: a file is a document. jsonl, parquet: a record is one."""
    text_field: str = "text"
    """Field of a record that holds the document: text, or (parquet) raw bytes; a.b is the field b of the struct a."""
    in_place: bool = False
    """Read local parquet files block by block where they are, not from a copy in the cache that is shuffled whole."""
    dataset: str = ""
    """Repository of a hub dataset, such as HuggingFaceFW/fineweb-edu. Its parquet files are read; no code of it is."""
    name: str | list[str] = ""
    """Configuration of the hub dataset, or several that are read as one; empty: its default one."""
    split: str = "train"
    """Split of the hub dataset."""
    revision: str | None = None
    """Commit, tag or branch of the hub dataset; unset: main as it is when the run starts. A commit stays the same."""
    opener: str = ""
    """Which opener that a module of job.import registers with register_source reads a source of kind own."""
    options: dict[str, str] = field(default_factory=dict)
    """What the opener of a source of kind own is given."""
    markers: Markers | None = None
    """Ids around each document's bytes that say what they are; auto: by how the document begins. Unset: none."""
    max_document_bytes: int | None = None
    """For this source, in place of data.max_document_bytes."""
    repeat: bool = True
    """Whether the source begins again, in a new order, when all of it was read; if not, the run ends there."""
    interleave: int = 1
    """Documents that take turns at a row's place in the batch, a step each: so neighbouring rows of a long document are
    that many steps apart. For sources of which a run reads many rows; see docs/data.md."""

    def __post_init__(self) -> None:
        self._refuse_keys_of_other_kinds()
        if self.max_document_bytes is not None and self.max_document_bytes < 0:
            raise ValueError(f"max_document_bytes = {self.max_document_bytes} is negative; 0 means no limit")
        if self.interleave < 1:
            raise ValueError(f"interleave = {self.interleave} must be at least 1")
        if self.kind == "builtin" and self.part is None:
            raise ValueError('part is not set: kind = "builtin" needs part = "english", or another built-in part')
        if self.kind == "files" and (not self.globs or not all(self.globs)):
            raise ValueError('path is empty: kind = "files" needs path = "folder/*.jsonl" or a list of such globs')
        if self.kind == "hub" and not self.path and (self.format or self.in_place):
            raise ValueError("format and in_place are for local files; give their path, or remove the keys")
        if self.kind == "hub" and not (self.dataset and self.split and self.names):
            raise ValueError('dataset, split or name is empty: kind = "hub" needs dataset = "owner/name"')
        if self.kind == "own" and not self.opener:
            raise ValueError('opener is empty: kind = "own" needs the name that a module of job.import registers')
        if not self.text_field:
            raise ValueError("text_field is empty: name the field that holds the document")
        if self.format in ("txt", "bytes") and self.text_field != "text":
            raise ValueError(
                f'text_field = "{self.text_field}": {self.format} files have no fields; remove it or change format'
            )

    def _refuse_keys_of_other_kinds(self) -> None:
        read = _KEYS_OF_KIND[self.kind]
        others = {key for keys in _KEYS_OF_KIND.values() for key in keys} - set(read)
        for item in dataclasses.fields(self):
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            if item.name in others and getattr(self, item.name) != default:
                kinds = " or ".join(f'"{kind}"' for kind, keys in _KEYS_OF_KIND.items() if item.name in keys)
                raise ValueError(f'{item.name} is for kind = {kinds}, not "{self.kind}"; remove it or change kind')

    @property
    def is_local(self) -> bool:
        """Whether local files are read: those of kind files, and those that stand in for a hub dataset."""
        return self.kind == "files" or (self.kind == "hub" and bool(self.path))

    @property
    def globs(self) -> list[str]:
        """``path`` as a list."""
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def names(self) -> list[str | None]:
        """``name`` as a list; None stands for the default configuration."""
        return [self.name or None] if isinstance(self.name, str) else [*self.name]


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
    on_bad_record: Literal["skip", "stop"] = "skip"
    """What a record that holds no document does: skip counts and names it in the log, stop ends the run."""
    hub_retry_seconds: float = 60.0
    """How long a failing hub is asked again, ever more slowly; well below comm.train_timeout_seconds on many ranks."""
    num_workers: int = 0
    """Processes that read and pack beside the trainer; 0: the trainer's own. The batches do not depend on it."""
    prefetch_batches: int = 4
    """Batches that each worker process makes ahead."""

    def __post_init__(self) -> None:
        if self.max_document_bytes < 0:
            raise ValueError(f"max_document_bytes = {self.max_document_bytes} is negative; 0 means no limit")
        if not 0.0 <= self.held_out_fraction < 1.0:
            raise ValueError(f"held_out_fraction = {self.held_out_fraction} is not in [0, 1)")
        if self.num_workers < 0:
            raise ValueError(f"num_workers = {self.num_workers} is negative; 0 means no worker process")
        if self.prefetch_batches < 1:
            raise ValueError(f"prefetch_batches = {self.prefetch_batches} must be at least 1")
        if self.hub_retry_seconds < 0:
            raise ValueError(f"hub_retry_seconds = {self.hub_retry_seconds} is negative; 0 means no second try")
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
