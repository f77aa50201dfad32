import struct
from pathlib import Path

import gguf
import pytest

from paceline.errors import CorruptModel, ModelError, UnknownModel
from paceline.gguf_header import read_header
from support import tiny_gguf
from support.tiny_gguf import VOCAB

ARRAYS = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"attention.sliding_window_pattern": [True, False]}
    return tiny_gguf.write(
        tmp_path_factory.mktemp("gguf") / "m.gguf", "gemma3", kind="Q4_K", settings=settings
    )


@pytest.mark.parametrize("long_arrays", [True, False])
def test_metadata_is_what_the_gguf_package_reads(path: Path, long_arrays: bool) -> None:
    reference = gguf.GGUFReader(path).fields
    metadata = read_header(path, long_arrays).metadata
    hidden = set() if long_arrays else ARRAYS
    assert set(metadata) == {name for name in reference if not name.startswith("GGUF.")} - hidden
    for name, value in metadata.items():
        assert value == reference[name].contents(), name


def test_tensors_lie_where_the_gguf_package_finds_them(path: Path) -> None:
    tensors = read_header(path).tensors
    reference = gguf.GGUFReader(path).tensors
    assert list(tensors) == [tensor.name for tensor in reference]
    for tensor in reference:
        info = tensors[tensor.name]
        assert (info.shape, info.offset) == (tuple(tensor.shape[::-1].tolist()), tensor.data_offset)
        assert info.encoding == tensor.tensor_type.name


def test_the_header_is_kept_as_stored(path: Path) -> None:
    raw = read_header(path).raw
    assert raw == path.read_bytes()[: len(raw)]
    assert len(raw) <= min(tensor.offset for tensor in read_header(path).tensors.values())
    assert len(read_header(path).metadata["tokenizer.ggml.tokens"]) == VOCAB


@pytest.mark.parametrize("long_arrays", [True, False])
def test_every_cut_is_reported(path: Path, tmp_path: Path, long_arrays: bool) -> None:
    raw, cut = read_header(path).raw, tmp_path / "m.gguf"
    for end in [*range(64), *range(64, len(raw), 37), len(raw) - 1]:
        cut.write_bytes(raw[:end])
        with pytest.raises(CorruptModel, match=r"^m\.gguf is (not a GGUF file|truncated)"):
            read_header(cut, long_arrays)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1, expected one of"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 2**60), "truncated"),
        (24, struct.pack("<Q", 2**63), "truncated"),
        (32, b"\xff", "not UTF-8"),
    ],
)
def test_damage_is_named(path: Path, tmp_path: Path, at: int, new: bytes, message: str) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(data)
    with pytest.raises(CorruptModel, match=rf"^m\.gguf is .*{message}"):
        read_header(damaged)


@pytest.mark.parametrize("depth", [1, 100_000])
def test_arrays_of_arrays(tmp_path: Path, depth: int) -> None:
    nested = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 2) + b"\x01\x02"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path = tmp_path / "m.gguf"
    path.write_bytes(header + nested)
    if depth == 1:
        assert read_header(path).metadata == {"k": [[1, 2]]}
    else:
        with pytest.raises(CorruptModel, match="without end"):
            read_header(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"there is no m\.gguf"):
        read_header(tmp_path / "m.gguf")


def test_a_header_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match=r"^folder cannot be read: Is a directory$"):
        read_header(tmp_path / "folder")
