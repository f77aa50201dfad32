import pytest

from paceline.errors import PullError
from paceline.hub.repository import (
    PREFERENCE,
    UNREADABLE,
    HubName,
    RepositoryFile,
    preference,
    quantisation,
    select,
    unreadable,
)
from paceline.target.weights.dequant import ENCODINGS


def listed(*paths: str) -> list[RepositoryFile]:
    return [RepositoryFile(path, 10, "") for path in paths]


def chosen(name: str, *paths: str) -> list[str]:
    parsed = HubName.parse(name)
    assert parsed
    return [file.path for file in select(parsed, listed(*paths)).files]


@pytest.mark.parametrize(
    ("name", "repository", "variant"),
    [
        ("owner/name", "owner/name", ""),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", ""),
        ("a/b_c.d:q4_k_m", "a/b_c.d", "q4_k_m"),
        ("hf.co/a/b:UD-Q4_K_XL", "a/b", "UD-Q4_K_XL"),
        ("hf://a/b:m-00001-of-00002.gguf", "a/b", "m-00001-of-00002.gguf"),
        ("a/b:latest", "a/b", ""),
        ("a/b@main", "a/b", ""),
    ],
)
def test_hub_names(name: str, repository: str, variant: str) -> None:
    assert HubName.parse(name) == HubName(repository, variant)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b@v1.0", HubName("a/b", "", "v1.0")),
        ("hf.co/a/b@v1.0:Q8_0", HubName("a/b", "Q8_0", "v1.0")),
        ("a/b@refs/pr/3:q4_k_m", HubName("a/b", "q4_k_m", "refs/pr/3")),
        ("a/b@0123abc:m-Q4_0.gguf", HubName("a/b", "m-Q4_0.gguf", "0123abc")),
    ],
)
def test_names_with_a_revision(name: str, expected: HubName) -> None:
    assert HubName.parse(name) == expected == HubName.parse(str(expected))
    assert HubName.of_folder(expected.folder) == expected
    assert expected.folder.count("/") == 1


@pytest.mark.parametrize(
    "name",
    [
        *("a/b@", "a/b@..", "a/b@x/../y", "a/b@/x", "a/b@x/", "a/b@x@y", "a/b:Q4_0@x", "a/b@x%2Fy"),
        *("name", "a/b/c", "../name", "owner/..", "/name", "a/b.gguf", "a/", "é/b", "a/b\n", "a/b:"),
        *("a/b:../c", "a/b:c/d", "a/b.partial", "a/b:Q4_0.partial", "a/b: Q4", "a/b:.x"),
    ],
)
def test_what_is_not_a_hub_name(name: str) -> None:
    assert HubName.parse(name) is None


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("model_q8_0.GGUF", "Q8_0"),
        ("x-fp16.gguf", "F16"),
        ("Llama-3.2-1B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-BF16-00001-of-00002.gguf", "BF16"),
        ("a-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("tiny.gguf", ""),
        ("q4zzz.gguf", ""),
    ],
)
def test_the_quantisation_is_read_from_the_file_name(file: str, label: str) -> None:
    assert quantisation(file) == label


def test_only_quantisations_that_a_backend_reads_are_preferred() -> None:
    stored = {encoding.removesuffix("_K") for encoding in ENCODINGS}
    for label in PREFERENCE:
        assert not unreadable(label)
        assert label.partition("_K")[0] in stored, label
    assert not [encoding for encoding in ENCODINGS if encoding.startswith(UNREADABLE)]
    assert sorted(["IQ4_XS", "Q8_0", "UD-Q4_K_M", "Q4_K_M", "Q4_K_XL", "F16"], key=preference) == [
        *("Q4_K_M", "UD-Q4_K_M", "Q8_0", "F16", "Q4_K_XL", "IQ4_XS")
    ]


def test_the_order_of_the_parts_is_that_of_their_numbers() -> None:
    parts = [f"m-Q8_0-{number:05}-of-00012.gguf" for number in range(1, 13)]
    assert chosen("a/b", *reversed(parts)) == parts
    assert chosen("a/b:q8_0", *parts, "m-Q4_0.gguf") == parts


def test_a_split_model_with_a_part_missing_is_refused() -> None:
    with pytest.raises(PullError, match="split into 3 parts, and the repository has 2 of them"):
        chosen("a/b", "m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf")


def test_the_only_file_needs_no_quantisation_in_its_name() -> None:
    assert chosen("a/b", "tiny.gguf", "mmproj-Q8_0.gguf", "imatrix.gguf") == ["tiny.gguf"]


def test_two_files_of_one_quantisation_go_by_their_names() -> None:
    files = ("small-Q4_0.gguf", "large-Q4_0.gguf")
    with pytest.raises(PullError, match=r"several models: .*a/b:large-Q4_0.gguf`, or another of large"):
        chosen("a/b", *files)
    with pytest.raises(PullError, match="has no Q4_0"):
        chosen("a/b:Q4_0", *files)
    assert chosen("a/b:small-q4_0.gguf", *files) == ["small-Q4_0.gguf"]


def test_a_repository_of_unreadable_quantisations_alone_is_refused() -> None:
    with pytest.raises(PullError, match=r"IQ2_XXS is a quantisation .* nothing else is there"):
        chosen("a/b", "m-IQ2_XXS.gguf")


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_half_a_folder_is_no_model(lacking: str) -> None:
    files = {"config.json", "model.safetensors", "tokenizer.json"} - {lacking}
    with pytest.raises(PullError, match=r"holds no model: expected config.json and \*.safetensors"):
        chosen("a/b", *files)


def test_a_folder_has_what_a_model_needs_and_nothing_more() -> None:
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    wanted += ["1_Pooling/config.json"]
    assert chosen("a/b", *wanted, "README.md", "onnx/config.json", "m-Q4_0.gguf") == wanted
