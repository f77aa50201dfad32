"""The header reader, against the gguf library and against damage."""

from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CorruptModel, UnknownModel
from paceline.text.gguf_metadata import read_metadata


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", "héllo ▁")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.ratio", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_uint64("a.large", 1 << 40)
    writer.add_array("a.texts", ["x", "", "👍"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_reads_what_the_library_wrote(sample: Path) -> None:
    assert read_metadata(sample) == {
        "general.architecture": "llama",
        "a.text": "héllo ▁",
        "a.count": 7,
        "a.ratio": 0.5,
        "a.flag": True,
        "a.large": 1 << 40,
        "a.texts": ["x", "", "👍"],
        "a.numbers": [1, -2, 3],
        "a.floats": [0.25, -1.0],
    }


def test_reads_what_the_library_reads(sample: Path) -> None:
    found = read_metadata(sample)
    theirs = gguf.GGUFReader(sample).fields
    assert all(theirs[key].contents() == value for key, value in found.items())


def test_every_truncation_is_damage_in_one_line(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModel, match=r"^[^\n]*cut\.gguf is damaged[^\n]*pull it again$"):
            read_metadata(cut)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), run=st.integers(1, 9))
def test_changed_bytes_never_give_another_kind_of_error(
    sample: Path, tmp_path_factory: pytest.TempPathFactory, at: int, value: int, run: int
) -> None:
    data = bytearray(sample.read_bytes())
    at %= len(data)
    data[at : at + run] = bytes([value]) * len(data[at : at + run])
    damaged = tmp_path_factory.getbasetemp() / "changed.gguf"
    damaged.write_bytes(data)
    with suppress(CorruptModel):
        read_metadata(damaged)


def test_other_files(tmp_path: Path) -> None:
    text = tmp_path / "readme.txt"
    text.write_text("not a model, but longer than the header of one")
    with pytest.raises(CorruptModel, match="does not begin with GGUF"):
        read_metadata(text)
    with pytest.raises(UnknownModel, match=r"none\.gguf"):
        read_metadata(tmp_path / "none.gguf")
    with pytest.raises(UnknownModel, match="cannot read"):
        read_metadata(tmp_path)
