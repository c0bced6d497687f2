import io
import re
import struct
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest

from spider_titan.config import load_config
from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data import generated, sources
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import ListSource, Settings, SplitSource, digest
from spider_titan.data.loader import build_train_loader
from spider_titan.data.rows import encode_document
from spider_titan.data.sources import load_sources, register_source
from spider_titan.data.tokenizer import Modality, encode, modality_of
from spider_titan.vocabulary import (
    AUDIO_END_ID,
    AUDIO_START_ID,
    BOS_ID,
    EOS_ID,
    IMAGE_END_ID,
    IMAGE_START_ID,
    VIDEO_END_ID,
    VIDEO_START_ID,
)

DEBUG = Path(__file__).resolve().parents[2] / "train_configs" / "debug.toml"


def test_math_is_right() -> None:
    statements = 0
    for document in generated.math():
        for left, right in re.findall(r"^(?:So |Check: )?([\d +*-]+) = ([\d +*-]+?)[.,]?$", document.decode(), re.M):
            assert eval(left) == eval(right), (left, right)
            statements += 1
        for a, b, divisor in re.findall(r"gcd\((\d+), (\d+)\) = (\d+)", document.decode()):
            assert np.gcd(int(a), int(b)) == int(divisor)
            statements += 1
        for a, n, slope in re.findall(r"f\(x\) = (\d+)x\^(\d+) .*?\nThe derivative .* = (\d+)x", document.decode()):
            assert int(a) * int(n) == int(slope)
            statements += 1
    assert statements > 5000


def test_images_and_sounds_are_real_files() -> None:
    images, sounds = generated.multimodal()[::2], generated.multimodal()[1::2]
    for image in images:
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        chunks, rest = {}, image[8:]
        while rest:
            (size,) = struct.unpack(">I", rest[:4])
            kind, data, check = rest[4:8], rest[8 : 8 + size], rest[8 + size : 12 + size]
            assert struct.pack(">I", zlib.crc32(kind + data)) == check
            chunks[kind], rest = data, rest[12 + size :]
        width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
        pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
        assert (width, height, depth, colour) == (24, 24, 8, 0) and not pixels[:, 0].any()
        assert len(np.unique(pixels[:, 1:])) >= 3
    for sound in sounds:
        with wave.open(io.BytesIO(sound)) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 1, 8000)
            assert len(set(file.readframes(file.getnframes()))) == 2


def test_generated_documents_are_pinned() -> None:
    # A change here changes the data of every run that is resumed.
    for part, expected in ((generated.math, 8761134384289506942), (generated.multimodal, 1372923607336133461)):
        documents = part()
        part.cache_clear()
        assert part() == documents
        assert len(set(documents)) == len(documents)
        assert digest(b"".join(documents)) == expected


@pytest.mark.parametrize(
    ("document", "modality"),
    [
        (b"\x89PNG\r\n\x1a\n...", "image"),
        (b"\xff\xd8\xff\xe0", "image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio"),
        (b"RIFF\0\0\0\0AVI LIST", "video"),
        (b"\0\0\0\x18ftypmp42", "video"),
        (b"fLaC\0", "audio"),
        (b"plain text", None),
        (b"", None),
    ],
)
def test_documents_are_known_by_their_beginning(document: bytes, modality: Modality | None) -> None:
    assert modality_of(document) == modality
    assert encode(document, "auto").tolist() == encode(document, modality).tolist()


@pytest.mark.parametrize(
    ("markers", "before", "after"),
    [
        (None, [BOS_ID], [EOS_ID]),
        ("image", [BOS_ID, IMAGE_START_ID], [IMAGE_END_ID, EOS_ID]),
        ("audio", [BOS_ID, AUDIO_START_ID], [AUDIO_END_ID, EOS_ID]),
        ("video", [BOS_ID, VIDEO_START_ID], [VIDEO_END_ID, EOS_ID]),
    ],
)
@pytest.mark.parametrize("document", [b"", b"\0\xff", bytes(range(256))])
def test_markers_stand_around_the_bytes(
    markers: Modality | None, before: list[int], after: list[int], document: bytes
) -> None:
    assert encode(document, markers).tolist() == [*before, *document, *after]


def test_a_source_has_its_own_limit_and_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(b"x" * 100)
    path = str(tmp_path / "a.png")
    pair = {
        "cut": SourceConfig(kind="files", path=path, format="bytes", markers="image", max_document_bytes=10),
        "whole": SourceConfig(kind="files", path=path, format="bytes", max_document_bytes=0),
        "usual": SourceConfig(kind="files", path=path, format="bytes"),
    }
    phases = [PhaseConfig(weights=dict.fromkeys(pair, 1.0))]
    opened = load_sources(DataConfig(pair, phases, max_document_bytes=30, held_out_fraction=0.0))
    sizes = {name: encode_document(b"x" * 100, source.settings).size for name, source in opened.items()}
    assert sizes == {"cut": 14, "whole": 102, "usual": 32}


def test_a_source_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_OPENERS", {})
    register_source("counting", lambda options: ListSource([b"%d" % n for n in range(int(options["count"]))]))
    with pytest.raises(ValueError, match="'counting' is registered already"):
        register_source("counting", lambda options: ListSource([b"x"]))
    mine = SourceConfig(kind="own", opener="counting", options={"count": "7"})
    config = DataConfig({"mine": mine}, [PhaseConfig(weights={"mine": 1})], held_out_fraction=0.0)
    assert load_sources(config)["mine"].describe().startswith("mine: 7 documents, 7 bytes")
    missing = DataConfig({"mine": SourceConfig(kind="own", opener="other")}, config.phases)
    with pytest.raises(
        ValueError, match=r"data.sources.mine.opener: 'other' is not registered \(registered: counting\)"
    ):
        load_sources(missing)


def test_the_debug_run_reads_all_five_phases_in_their_shares() -> None:
    config = load_config(["--job.config_file", str(DEBUG)])
    data, training = config.data, config.training
    assert [phase.until for phase in data.phases] == [0.3, 0.5, 0.7, 0.9, 1.0]
    assert [phase.boundary for phase in data.phases] == ["fixed", *["adaptive"] * 4]
    assert training.steps
    rows, seq_len = training.local_batch_size, training.seq_len
    curriculum = Curriculum(data.phases, byte_budget=training.steps * rows * seq_len, bytes_per_step=rows * seq_len)
    # In place of the real documents some that tell by each of their bytes which source they are of.
    marked = {
        name: SplitSource(name, ListSource([bytes([number]) * 500] * 20), Settings(0.0))
        for number, name in enumerate(data.used_sources)
    }
    batches = build_train_loader(
        data, marked, curriculum, seq_len=seq_len, batch_size=rows, num_rows=rows, seed=training.seed
    )
    counts = np.zeros((len(data.phases), len(marked)))
    for step in range(training.steps):
        ids = next(batches).input_ids.numpy()
        counts[curriculum.index_at(step)] += np.bincount(ids[ids < 256], minlength=len(marked))
    for phase, count in zip(data.phases, counts, strict=True):
        weights = np.array([phase.weights.get(name, 0.0) for name in marked])
        np.testing.assert_allclose(count / count.sum(), weights / weights.sum(), atol=0.02)
        assert ((count > 0) == (weights > 0)).all()
