"""``[data.sources]`` -> sources: which code opens which kind, one of your own among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spider_titan.data import corpus, generated
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import ListSource, Settings, Source, SplitSource, TrainingSource
from spider_titan.data.problems import BadRecords

_BUILTIN_PARTS: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "english": corpus.english,
    "code": corpus.code,
    "multilingual": corpus.multilingual,
    "math": generated.math,
    "multimodal": generated.multimodal,
}

Opener = Callable[[Mapping[str, str]], Source]
"""Takes ``options`` of a source and returns its documents."""

_OPENERS: dict[str, Opener] = {}


def register_source(name: str, opener: Opener) -> None:
    """Makes ``opener`` what reads the sources with ``kind = "own"`` and ``opener = name``.

    Args:
        name: Not taken yet.
        opener: Takes the source's ``options`` and returns the documents, which ``ListSource`` can hold.
    """
    if name in _OPENERS:
        raise ValueError(f"a source opener '{name}' is registered already; choose another name")
    _OPENERS[name] = opener


def open_source(name: str, config: DataConfig) -> TrainingSource:
    """Opens one source of ``config``.

    Raises:
        ValueError: If it cannot be read, or has nothing to train on; names it.
    """
    source = config.sources[name]
    limit = config.max_document_bytes if source.max_document_bytes is None else source.max_document_bytes
    settings = Settings(
        held_out_fraction=config.held_out_fraction,
        repeat=source.repeat,
        markers="auto" if source.part == "multimodal" else source.markers,
        max_document_bytes=limit,
        interleave=source.interleave,
    )
    bad_records = BadRecords(name, config.on_bad_record)
    if source.kind == "hub" and not source.is_local:
        # Takes over a second to import, for nothing in a run on built-in text.
        from spider_titan.data.hub import open_hub

        return open_hub(name, source, settings, bad_records, retry_seconds=config.hub_retry_seconds)
    if source.in_place:
        from spider_titan.data.files import open_in_place

        return open_in_place(name, source, settings, bad_records)
    return SplitSource(name, _open_by_number(name, source, bad_records), settings, bad_records)


def load_sources(config: DataConfig) -> dict[str, TrainingSource]:
    """Opens the sources that some phase reads, sorted by name.

    Raises:
        ValueError: As ``open_source``.
    """
    return {name: open_source(name, config) for name in config.used_sources}


def _open_by_number(name: str, config: SourceConfig, bad_records: BadRecords) -> Source:
    if config.is_local:
        from spider_titan.data.files import open_files

        return open_files(name, config, bad_records)
    if config.kind == "own":
        if config.opener not in _OPENERS:
            known = ", ".join(sorted(_OPENERS)) or "none"
            raise ValueError(
                f"data.sources.{name}.opener: '{config.opener}' is not registered (registered: {known}); name the "
                f"module that calls register_source in job.import"
            )
        return _OPENERS[config.opener](config.options)
    assert config.part is not None
    return ListSource(_BUILTIN_PARTS[config.part]())
