"""Pulls from a hub on this machine, through the library that speaks with the real one."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
import pytest

from paceline.errors import CorruptModel, PullError, UnknownModel
from paceline.hub import installed, offer, pull, resolve
from paceline.hub.huggingface import look_up
from paceline.hub.repository import HubName
from paceline.target.weights.pooling import read_pooling
from support.model_hub import COMMIT, STRANGER, TOKEN, ModelHub, Repository, model_hub, use
from support.servers import START_S, until
from support.wheels import interrupt

FOLDER = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 40,
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "empty.json": b"",
    "pytorch_model.bin": b"not wanted",
    "onnx/config.json": b"not wanted",
}
WANTED = ["chat_template.jinja", "config.json", "empty.json", "model.safetensors", "tokenizer.model"]
GGUFS = {
    "README.md": b"not wanted",
    "m-Q8_0.gguf": b"8" * 5000,
    "m-Q4_K_M.gguf": b"4" * 3000,
    "m-IQ2_XXS.gguf": b"2" * 1000,
    "mmproj-F16.gguf": b"eyes",
}
SPLIT = {f"BF16/m-BF16-0000{number}-of-00003.gguf": bytes([number]) * 2000 for number in (1, 2, 3)}


DEAD = 20 * [0]  # cuts: more than there are attempts


@pytest.fixture(scope="module")
def server() -> Iterator[ModelHub]:
    with model_hub() as found:
        yield found


@pytest.fixture
def hub(server: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHub:
    server.reset()
    server.add("owner/folder", FOLDER)
    server.add("owner/quants", GGUFS)
    server.add("owner/split", SPLIT)
    use(server, tmp_path, monkeypatch)
    return server


def test_the_hub_of_these_tests_serves_the_librarys_own_downloads(hub: ModelHub, tmp_path: Path) -> None:
    """Else the tests below would prove that two inventions agree."""
    for file in ("m-Q8_0.gguf", "README.md"):
        path = huggingface_hub.hf_hub_download(
            "owner/quants", file, local_dir=tmp_path / "plain", endpoint=hub.url
        )
        assert Path(path).read_bytes() == GGUFS[file]
    listed: Any = huggingface_hub.HfApi(endpoint=hub.url).list_repo_tree("owner/quants")
    digests = {entry.path: entry.lfs.sha256 for entry in listed if entry.lfs}
    assert digests["m-Q8_0.gguf"] == hashlib.sha256(GGUFS["m-Q8_0.gguf"]).hexdigest()
    assert {asked.method for asked in hub.asked} == {"GET", "HEAD"}


def test_a_folder_is_pulled_whole_and_found_again(hub: ModelHub) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("owner/folder", lambda done, total, label: seen.append((done, total)))
    assert path == resolve("owner/folder")
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != "paceline.json"} == {
        name: FOLDER[name] for name in WANTED
    }
    total = sum(len(FOLDER[name]) for name in WANTED)
    assert seen[-1] == (total, total)
    line = installed()[-1]
    assert (line.name, line.size, line.licence, line.pulled) == ("owner/folder", total, "mit", True)
    assert line.format == "safetensors"
    assert all(f"/resolve/{COMMIT}/" in asked.path for asked in hub.asked if "/resolve/" in asked.path)


def test_a_model_for_embeddings_pools_as_its_repository_says(hub: ModelHub) -> None:
    hub.add("owner/embedder", FOLDER | {"1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}'})
    path = pull("owner/embedder")
    assert read_pooling(path) == "mean"
    assert (path / "config.json").read_bytes() == FOLDER["config.json"]


def test_a_pulled_model_is_not_requested_again(hub: ModelHub) -> None:
    first = pull("owner/folder")
    hub.asked.clear()
    assert pull("owner/folder") == first
    assert pull("owner/quants:q8_0") == pull("owner/quants:Q8_0") == pull("owner/quants")
    assert len(hub.downloads()) == 1


@pytest.mark.parametrize(
    "name",
    [
        "owner/quants",
        "owner/quants:q4_k_m",
        "owner/quants:m-Q4_K_M.gguf",
        "owner/quants:latest",
        "hf.co/owner/quants:Q4_K_M",
        "hf://owner/quants",
        "https://huggingface.co/owner/quants",
    ],
)
def test_a_gguf_file_goes_by_its_quantisation(hub: ModelHub, name: str) -> None:
    path = pull(name)
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == GGUFS["m-Q4_K_M.gguf"]
    assert resolve(name) == resolve("owner/quants:Q4_K_M") == resolve("owner/quants") == path
    assert hub.downloads() == ["m-Q4_K_M.gguf"]
    line = installed()[-1]
    assert (line.name, line.size, line.format) == ("owner/quants:Q4_K_M", 3000, "Q4_K_M")


def test_of_several_quantisations_here_the_preferred_one_has_the_short_name(hub: ModelHub) -> None:
    eight = pull("owner/quants:Q8_0")
    assert resolve("owner/quants") == eight
    four = pull("owner/quants:Q4_K_M")
    assert resolve("owner/quants") == four
    assert resolve("owner/quants:q8_0") == eight


OLD = {"m-Q8_0.gguf": b"o" * 5000, "m-Q4_K_M.gguf": b"O" * 3000}


def test_revisions_do_not_mix(hub: ModelHub) -> None:
    commit = hub.revise("owner/quants", "v1", OLD)
    old = pull("owner/quants@v1")
    assert old.read_bytes() == OLD["m-Q4_K_M.gguf"]
    with pytest.raises(UnknownModel):  # an old revision never stands for the current one
        resolve("owner/quants")
    new = pull("owner/quants")
    assert new.read_bytes() == GGUFS["m-Q4_K_M.gguf"]
    assert pull("owner/quants@main") == new
    eight = pull("owner/quants@v1:q8_0")
    assert eight.read_bytes() == OLD["m-Q8_0.gguf"]
    pinned = pull(f"owner/quants@{commit}:Q8_0")
    assert pinned.read_bytes() == eight.read_bytes()
    assert pinned != eight
    assert resolve("owner/quants@v1") == old
    assert resolve("owner/quants") == new
    lines = {line.name: line.revision for line in installed() if "/" in line.name}
    assert lines == {
        "owner/quants:Q4_K_M": COMMIT,
        "owner/quants@v1:Q4_K_M": commit,
        "owner/quants@v1:Q8_0": commit,
        f"owner/quants@{commit}:Q8_0": commit,
    }


def test_a_branch_may_have_slashes_and_stays_where_it_was_pulled(hub: ModelHub) -> None:
    commit = hub.revise("owner/folder", "refs/pr/3", FOLDER | {"config.json": b'{"old": 1}'})
    path = pull("owner/folder@refs/pr/3")
    assert (path / "config.json").read_bytes() == b'{"old": 1}'
    assert resolve("owner/folder@refs/pr/3") == path
    assert pull("owner/folder") != path
    hub.revise("owner/folder", "refs/pr/3", FOLDER)
    assert pull("owner/folder@refs/pr/3") == path
    assert [line.revision for line in installed() if line.name.endswith("@refs/pr/3")] == [commit]


def test_a_pull_of_a_revision_is_resumed(hub: ModelHub) -> None:
    hub.revise("owner/quants", "v1", OLD)
    hub.cuts = [1000, *DEAD]
    with pytest.raises(PullError, match="owner/quants@v1:Q8_0"):
        pull("owner/quants@v1:Q8_0")
    hub.cuts = []
    assert pull("owner/quants@v1:Q8_0").read_bytes() == OLD["m-Q8_0.gguf"]
    assert hub.downloads()[-1] == "m-Q8_0.gguf bytes=1000-"


def test_a_hub_without_a_main_branch_is_told_by_its_name(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Repository, "at", lambda self, revision: None)
    for name in ("owner/quants", "owner/quants@main"):
        with pytest.raises(PullError, match=r"no branch, tag or commit main: http"):
            pull(name)


def test_a_revision_that_is_not_there_is_named(hub: ModelHub) -> None:
    with pytest.raises(PullError, match=r"no branch, tag or commit v9"):
        pull("owner/quants@v9")
    hub.revise("owner/quants", "v1", OLD)
    with pytest.raises(PullError, match=r"pull owner/quants@v1:Q4_K_M"):
        pull("owner/quants@v1:BF16")


def test_safetensors_come_before_gguf_files_unless_named(hub: ModelHub) -> None:
    hub.add("owner/both", FOLDER | GGUFS)
    assert pull("owner/both:Q8_0").name == "m-Q8_0.gguf"
    assert resolve("owner/both").name == "m-Q8_0.gguf"
    hub.repositories["owner/both"].files.pop("m-Q8_0.gguf")
    assert look_up(HubName("owner/both")).selection.gguf == ""


def test_all_parts_of_a_split_model_are_pulled(hub: ModelHub) -> None:
    path = pull("owner/split:bf16")
    assert path.name == "m-BF16-00001-of-00003.gguf"
    assert [(path.parent / Path(name).name).read_bytes() for name in SPLIT] == list(SPLIT.values())
    assert resolve("owner/split:m-BF16-00002-of-00003.gguf") == path


def test_an_offer_tells_what_is_missing(hub: ModelHub) -> None:
    assert (offer("owner/quants").name, offer("owner/quants").size) == ("owner/quants:Q4_K_M", 3000)
    hub.cuts = [1000, *DEAD]
    with pytest.raises(PullError):
        pull("owner/quants")
    assert offer("owner/quants").size == 2000
    with pytest.raises(UnknownModel):
        offer("no-name-of-a-hub")


@pytest.mark.parametrize("resets", [False, True])
def test_a_cut_connection_is_taken_up_where_it_ended(hub: ModelHub, resets: bool) -> None:
    hub.cuts, hub.resets = [1000, 2000], resets
    assert pull("owner/quants:Q8_0").read_bytes() == GGUFS["m-Q8_0.gguf"]
    assert hub.downloads() == ["m-Q8_0.gguf", "m-Q8_0.gguf bytes=1000-", "m-Q8_0.gguf bytes=3000-"]


def test_what_arrived_before_a_cut_outlives_the_process(hub: ModelHub) -> None:
    hub.cuts = [1500, *DEAD]
    with pytest.raises(
        PullError, match=r"cannot be reached .*is kept; .*`paceline pull owner/split:BF16` again"
    ):
        pull("owner/split")
    with pytest.raises(UnknownModel, match="`paceline pull owner/split`"):
        resolve("owner/split")
    line = installed()[-1]
    assert (line.name, line.pulled, line.arrived) == ("owner/split:BF16", False, 1500)
    hub.cuts, hub.asked[:] = [500 + 2000, 100, *DEAD], []
    with pytest.raises(PullError):
        pull("owner/split")
    hub.cuts, hub.asked[:] = [], []
    path = pull("owner/split")
    assert hub.downloads() == [
        "m-BF16-00002-of-00003.gguf bytes=100-",
        "m-BF16-00003-of-00003.gguf",
    ]
    assert [(path.parent / Path(name).name).read_bytes() for name in SPLIT] == list(SPLIT.values())
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(
        [*(Path(name).name for name in SPLIT), "paceline.json"]
    )


def test_a_killed_process_leaves_what_arrived(hub: ModelHub) -> None:
    content = bytes(range(256)) * 800
    hub.add("owner/large", {"m-Q4_0.gguf": content})
    hub.hold_after = 100_000
    hub.held.clear()
    code = "import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 100; import paceline.hub as h; "
    process = subprocess.Popen([sys.executable, "-c", f"{code}h.pull('owner/large')"])
    try:
        assert until(lambda: installed()[-1].arrived > 50_000 or process.poll() is not None, START_S)
    finally:
        process.kill()
        process.wait()
    hub.held.set()
    kept = installed()[-1].arrived
    hub.asked.clear()
    assert pull("owner/large").read_bytes() == content
    assert hub.downloads() == [f"m-Q4_0.gguf bytes={kept}-"]


def test_a_server_without_ranges_sends_everything_again(hub: ModelHub) -> None:
    hub.cuts, hub.ignores_ranges = [1000], True
    assert pull("owner/quants").read_bytes() == GGUFS["m-Q4_K_M.gguf"]


def test_a_part_of_another_revision_is_not_continued(hub: ModelHub) -> None:
    hub.cuts = [1000, *DEAD]
    with pytest.raises(PullError):
        pull("owner/quants")
    hub.cuts = []
    hub.add("owner/quants", {"m-Q4_K_M.gguf": b"another" * 500, "extra.txt": b""})
    path = pull("owner/quants")
    assert path.read_bytes() == b"another" * 500
    assert sorted(file.name for file in path.parent.iterdir()) == ["m-Q4_K_M.gguf", "paceline.json"]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.model"])
def test_wrong_bytes_are_deleted_and_everything_else_is_kept(
    hub: ModelHub, tmp_path: Path, file: str
) -> None:
    hub.spoiled = {file}
    with pytest.raises(CorruptModel, match=rf"{file} of owner/folder has the wrong digest .*it is deleted"):
        pull("owner/folder")
    assert not [path for path in tmp_path.rglob(f"{file}*") if path.is_file()]
    hub.spoiled, hub.asked[:] = set(), []
    assert (pull("owner/folder") / file).read_bytes() == FOLDER[file]
    assert "config.json" not in hub.downloads()


def test_a_damaged_part_is_noticed_at_the_end(hub: ModelHub, tmp_path: Path) -> None:
    hub.cuts = [1000, *DEAD]
    with pytest.raises(PullError):
        pull("owner/quants")
    hub.cuts = []
    (part,) = tmp_path.rglob("*.part")
    part.write_bytes(b"x" * 1000)
    with pytest.raises(CorruptModel):
        pull("owner/quants")
    assert pull("owner/quants").read_bytes() == GGUFS["m-Q4_K_M.gguf"]


def test_a_folder_that_a_removal_left_is_replaced(hub: ModelHub) -> None:
    left = Path(os.environ["PACELINE_HOME"]) / "hub" / "owner" / "quants:Q4_K_M"
    left.mkdir(parents=True)
    (left / "m-Q4_K_M.gguf").write_bytes(b"a part")
    assert pull("owner/quants").read_bytes() == GGUFS["m-Q4_K_M.gguf"]


def test_a_pull_that_was_stopped_before_its_last_step_downloads_nothing_again(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(source: Path, goal: Path) -> None:
        interrupt() if source.is_dir() else os.replace(source, goal)

    with monkeypatch.context() as patch:
        patch.setattr("paceline.hub.huggingface.rename", stop)
        with pytest.raises(PullError, match="was interrupted"):
            pull("owner/folder")
    assert [line.name for line in installed() if line.arrived] == ["owner/folder"]
    assert not installed()[-1].pulled
    hub.asked.clear()
    assert sorted(file.name for file in pull("owner/folder").iterdir()) == sorted([*WANTED, "paceline.json"])
    assert hub.downloads() == []


def test_a_file_too_large_for_a_plain_download_says_what_to_do(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.hub.huggingface.MAX_FILE", 4000)
    with pytest.raises(PullError, match=r"`hf download owner/quants m-Q8_0\.gguf --local-dir FOLDER`"):
        pull("owner/quants:Q8_0")
    assert pull("owner/quants:Q4_K_M").is_file()


def test_an_interrupted_pull_says_how_to_resume(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def arrive_and_stop(url: str, stream: BinaryIO, **settings: Any) -> None:
        stream.write(b"some")
        interrupt()

    http_get = "huggingface_hub.file_download.http_get"
    monkeypatch.setattr(http_get, lambda *args, **settings: interrupt())
    with pytest.raises(PullError, match=r"was interrupted: run `paceline pull owner/quants` again$"):
        pull("owner/quants")
    monkeypatch.setattr(http_get, arrive_and_stop)
    resumed = r"interrupted; .*kept: run `paceline pull owner/quants` again to resume$"
    with pytest.raises(PullError, match=resumed):
        pull("owner/quants")
    with pytest.raises(PullError, match=r"interrupted; .*kept: .*owner/quants:q4_k_m` again to resume$"):
        pull("owner/quants:q4_k_m")


def test_nothing_that_has_arrived_is_not_said_to_be_kept(hub: ModelHub) -> None:
    hub.cuts = [*DEAD]
    with pytest.raises(PullError, match=r"cannot be reached \(\w+\): check the network.*:Q8_0` again, or"):
        pull("owner/quants:Q8_0")
    hub.status = 503
    with pytest.raises(PullError, match=r"status 503: try again later: run `[^`]*` again$"):
        pull("owner/quants:Q8_0")


def test_two_pulls_at_once_download_once(hub: ModelHub) -> None:
    """The second finds the lock of the first taken, waits, and takes over what the first has pulled."""
    hub.held.clear()
    waits, paths = threading.Event(), []

    def watch(done: int, total: int, label: str) -> None:
        if label.startswith("waiting"):
            waits.set()
            hub.held.set()

    threads = [threading.Thread(target=lambda: paths.append(pull("owner/quants", watch))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert waits.is_set()
    assert len(paths) == 2
    assert len(set(paths)) == 1
    assert hub.downloads() == ["m-Q4_K_M.gguf"]


def test_a_private_repository_needs_the_token_which_no_other_server_gets(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/secret", GGUFS, private=True)
    with pytest.raises(PullError, match=r"no such repository: .*set HF_TOKEN if it is private"):
        pull("owner/secret")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(PullError, match=r"no such repository: .*the account of your token cannot see it"):
        pull("owner/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.asked.clear()
    assert pull("owner/secret").is_file()
    sent = {asked.path.startswith("/content/"): asked.authorization for asked in hub.asked}
    assert sent == {False: f"Bearer {TOKEN}", True: ""}


def test_a_gated_repository_says_where_to_accept_its_licence(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/gated", GGUFS, gated=True)
    with pytest.raises(PullError, match=rf"accept its licence at {hub.url}/owner/gated, then set HF_TOKEN"):
        pull("owner/gated")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(
        PullError, match=rf"accept .* at {hub.url}/owner/gated with the account of your token"
    ):
        pull("owner/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull("owner/gated").is_file()


def test_a_wrong_token_is_named(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(PullError, match="does not accept your token: set HF_TOKEN"):
        pull("owner/quants")


@pytest.mark.parametrize(("status", "told"), [(429, "asks to wait"), (503, "answered with status 503")])
def test_a_hub_with_a_fault_is_one_line(hub: ModelHub, status: int, told: str) -> None:
    hub.status = status
    with pytest.raises(
        PullError, match=rf"the model hub {told}: .*`paceline pull owner/quants` again"
    ) as error:
        pull("owner/quants")
    assert "\n" not in str(error.value)


def test_no_hub_at_all_is_one_line(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        PullError, match=r"cannot be reached \(Connect\w*Error\).* or pull one of smollm2-135m"
    ):
        pull("owner/quants")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullError, match="HF_HUB_OFFLINE is set: unset it"):
        pull("owner/quants")


def test_a_full_disk_is_told_before_the_download(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(hub_home := os.environ["PACELINE_HOME"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real._replace(free=2000))
    with pytest.raises(PullError, match=rf"needs 0 MB under {hub_home}.* 0 MB are free: make room"):
        pull("owner/quants")
    assert hub.downloads() == []


def test_names_that_fit_nothing_list_what_there_is(hub: ModelHub) -> None:
    refusals: dict[str, str] = {
        "owner/quants:Q5_K_M": "run `paceline pull owner/quants:Q4_K_M`, or another of Q4_K_M, Q8_0",
        "owner/quants:IQ2_XXS": "IQ2_XXS is a quantisation that paceline does not read; run `paceline pull",
        "owner/folder:Q4_K_M": "owner/folder holds no model: expected",
        "owner/nothing": "no such repository",
    }
    for name, told in refusals.items():
        with pytest.raises(PullError) as error:
            pull(name)
        assert told in str(error.value)
    assert hub.downloads() == []


def test_without_the_hub_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    missing: Any = None  # makes the import fail
    monkeypatch.setitem(sys.modules, "huggingface_hub", missing)
    with pytest.raises(PullError, match="pip install huggingface_hub"):
        pull("owner/name")


def test_the_library_is_imported_for_a_hub_only() -> None:
    code = "import sys, paceline.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
