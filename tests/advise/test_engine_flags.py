"""Settings of other engines: the drafter that each can have, by the names of its options, and notes."""

import json
from dataclasses import replace

import pytest

from paceline.advise.engine_flags import (
    EAGLE_FORMAT,
    MEDUSA_FORMAT,
    NGRAM_NOTE,
    EngineFlags,
    Speculation,
    engine_flags,
    llama_cpp_flags,
    sglang_flags,
    vllm_flags,
    vllm_speculation,
)
from paceline.vllm.proposer import KEY, ProposerSettings
from paceline.vllm.serve_command import proposer_config

LISTED = ("grammar", "suffix", "ngram")
HEADS = {"block": "heads/block", "eagle": "heads/eagle", "medusa": "heads/medusa", "model": "small"}
BY_BATCH = ((1, 4, 8), (5, 16, 2), (17, 64, 0))
ONE_LENGTH = "one draft length, 8; best here by sequences in a pass: 2 for 5 to 16, none for 17 to 64"


def vllm_config(flags: EngineFlags) -> dict[str, object]:
    config: dict[str, object] = json.loads(flags.words[1])
    return config


def test_the_text_is_quoted_for_a_shell() -> None:
    flags = sglang_flags(Speculation(("model",), 4, {"model": "a folder"}))
    assert "--speculative-draft-model-path 'a folder' --speculative-num-steps 4" in flags.text
    assert flags.text.endswith("--speculative-num-draft-tokens 5")


@pytest.mark.parametrize(
    ("drafters", "vllm", "sglang"),
    [
        (LISTED, "custom_class", "NGRAM"),
        ((*LISTED, "block"), "dspark", "NGRAM"),
        ((*LISTED, "medusa"), "medusa", "NGRAM"),
        ((*LISTED, "block", "eagle"), "dspark", "EAGLE3"),
        (("ngram", "model"), "draft_model", "STANDALONE"),
    ],
)
def test_each_engine_has_the_best_of_the_drafters_that_it_knows(
    drafters: tuple[str, ...], vllm: str, sglang: str
) -> None:
    spec = Speculation(drafters, 8, HEADS)
    assert vllm_config(vllm_flags(spec))["method"] == vllm
    assert sglang_flags(spec).words[1] == sglang


def test_each_drafter_has_its_own_model() -> None:
    drafters = (*LISTED, "eagle", "model")
    spec = Speculation(drafters, 8, HEADS)
    assert vllm_config(vllm_flags(spec))["model"] == "heads/eagle"
    assert "heads/eagle" in sglang_flags(spec).words
    assert "small" in llama_cpp_flags(spec).words
    assert "small" not in llama_cpp_flags(Speculation(LISTED, 8, HEADS)).words


def test_a_drafter_without_a_model_is_left_out() -> None:
    flags = engine_flags(Speculation((*LISTED, "block", "model"), 8))
    assert vllm_config(flags["vllm"])["method"] == "custom_class"
    assert flags["vllm"].notes == (
        "vLLM with paceline's proposer drafts by suffix, ngram only; left out: grammar, block, model",
    )
    assert "draft-simple" not in flags["llama.cpp"].text


def test_notes_name_the_drafters_that_an_engine_leaves_out() -> None:
    flags = engine_flags(Speculation((*LISTED, "block", "model"), 8, HEADS))
    assert flags["vllm"].notes == ("vLLM drafts by block only; left out: grammar, suffix, ngram, model",)
    assert flags["sglang"].notes[0] == "SGLang drafts by model only; left out: grammar, suffix, ngram, block"
    assert flags["llama.cpp"].notes[0] == (
        "llama.cpp drafts by ngram, suffix, model only; left out: grammar, block"
    )
    none = engine_flags(Speculation(("grammar",), 8))
    assert none["sglang"] == EngineFlags((), ("SGLang drafts nothing; left out: grammar",))
    assert not none["vllm"].words
    assert not none["llama.cpp"].words


@pytest.mark.parametrize(
    ("drafters", "settings"),
    [
        (LISTED, {"max_batch": 16}),
        (("suffix",), {"drafters": ["suffix"], "max_batch": 16}),
        (("ngram", "suffix"), {"drafters": ["ngram", "suffix"], "max_batch": 16}),
    ],
)
def test_vllm_runs_pacelines_drafters_up_to_the_batch_that_pays(
    drafters: tuple[str, ...], settings: dict[str, object]
) -> None:
    words = vllm_flags(Speculation(drafters, 8, by_batch=BY_BATCH)).words
    assert words[::2] == ("--speculative-config", "--additional-config")
    assert json.loads(words[1]) == proposer_config(8)
    assert json.loads(words[3]) == {KEY: settings}
    ProposerSettings(**json.loads(words[3])[KEY])  # an unknown one is an error


def test_the_proposers_defaults_are_not_written() -> None:
    assert len(vllm_flags(Speculation(LISTED, 8)).words) == 2


def test_vllms_own_ngram_says_what_its_windows_mean() -> None:
    made = vllm_speculation(Speculation(("ngram",), 5), plugin=False)
    assert made.config == {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 5,
    }
    assert made.notes == (NGRAM_NOTE,)


@pytest.mark.parametrize(("drafter", "follows"), [("block", True), ("medusa", False), ("suffix", False)])
def test_vllm_drafts_less_as_the_batch_grows_where_its_method_can(drafter: str, follows: bool) -> None:
    made = vllm_speculation(Speculation((drafter,), 8, HEADS, BY_BATCH), plugin=False)
    assert made.config is not None
    lengths = made.config.get("num_speculative_tokens_per_batch_size")
    assert lengths == ([[1, 4, 8], [5, 16, 2], [17, 64, 0]] if follows else None)
    assert any(ONE_LENGTH in note for note in made.notes) is not follows


@pytest.mark.parametrize(
    ("longest", "length", "ranges"),
    [
        (9, 8, [[1, 4, 8], [5, 16, 2], [17, 64, 0]]),
        (5, 5, [[1, 4, 5], [5, 16, 2], [17, 64, 0]]),
        (2, 2, [[1, 16, 2], [17, 64, 0]]),
    ],
)
def test_a_head_is_not_asked_for_longer_drafts_than_it_makes(
    longest: int, length: int, ranges: list[list[int]]
) -> None:
    spec = Speculation(("block", "eagle"), 8, HEADS, BY_BATCH, {"block": longest, "eagle": longest})
    config = vllm_config(vllm_flags(spec))
    assert config["num_speculative_tokens"] == length
    assert config["num_speculative_tokens_per_batch_size"] == ranges
    assert sglang_flags(spec).text.endswith(f"--speculative-num-draft-tokens {length + 1}")
    even = replace(spec, by_batch=((1, 4, 8), (5, 64, 7)), longest={"block": 6})
    assert "num_speculative_tokens_per_batch_size" not in vllm_config(vllm_flags(even))


def test_notes_say_where_one_length_is_not_the_best() -> None:
    spec = Speculation(("suffix", "eagle"), 8, HEADS, BY_BATCH)
    assert f"SGLang has {ONE_LENGTH}" in sglang_flags(spec).notes
    assert f"llama.cpp has {ONE_LENGTH}" in llama_cpp_flags(spec).notes
    even = Speculation(("suffix", "eagle"), 8, HEADS, ((1, 64, 8),))
    assert not any("one draft length" in note for note in sglang_flags(even).notes)


def test_the_proposer_drafts_one_length_as_far_as_it_drafts() -> None:
    until = "paceline's proposer has one draft length, 8; best here by sequences in a pass: 2 for 5 to 16"
    assert until in vllm_flags(Speculation(("suffix",), 8, by_batch=BY_BATCH)).notes
    (note,) = Speculation(("suffix",), 8, by_batch=((1, 1, 8), (2, 2, 3), (3, 64, 8))).fixed_length("vLLM")
    assert note.endswith("best here by sequences in a pass: 3 for 2")
    assert not vllm_flags(Speculation(("suffix",), 8, by_batch=((1, 4, 8), (5, 64, 0)))).notes


def test_notes_say_which_checkpoints_of_heads_an_engine_reads() -> None:
    assert EAGLE_FORMAT in sglang_flags(Speculation(("eagle",), 8, HEADS)).notes
    assert EAGLE_FORMAT not in sglang_flags(Speculation(("model",), 8, HEADS)).notes
    assert MEDUSA_FORMAT in vllm_flags(Speculation(("medusa",), 8, HEADS)).notes


@pytest.mark.parametrize(
    ("drafter", "sglang", "llama_cpp"),
    [("block", "DSPARK", "draft-dspark"), ("eagle", "", "draft-eagle3"), ("model", "", "")],
)
def test_notes_say_which_heads_an_engine_runs_from_published_checkpoints_only(
    drafter: str, sglang: str, llama_cpp: str
) -> None:
    flags = engine_flags(Speculation((drafter,), 8, HEADS))
    for engine, option in (("sglang", sglang), ("llama.cpp", llama_cpp)):
        told = [note for note in flags[engine].notes if "as their authors publish them (--sp" in note]
        assert [option in note for note in told] == ([True] if option else [])
    assert not any("publish" in note for note in flags["vllm"].notes)


def test_sglang_drafts_a_chain_and_counts_the_last_token_of_the_text() -> None:
    flags = sglang_flags(Speculation(LISTED, 8))
    chain = "--speculative-num-draft-tokens 9 --speculative-ngram-max-bfs-breadth 1"
    assert flags.text == f"--speculative-algorithm NGRAM {chain}"
    assert flags.notes == (
        "SGLang drafts by suffix, ngram only; left out: grammar",
        "SGLang's NGRAM runs on CUDA, and since 0.5.16 on CPUs",
    )


def test_llama_cpp_takes_a_list_and_short_matches() -> None:
    flags = llama_cpp_flags(Speculation((*LISTED, "model"), 8, {"model": "draft.gguf"})).text
    assert flags.startswith("--spec-type ngram-simple,ngram-mod,draft-simple ")
    assert "--spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8" in flags
    assert "--spec-draft-model draft.gguf --spec-draft-n-max 8" in flags


def test_plain_decoding_needs_no_flags() -> None:
    for spec in (Speculation((), 8), Speculation(LISTED, 0), Speculation(("none",), 8)):
        assert engine_flags(spec) == dict.fromkeys(("vllm", "sglang", "llama.cpp"), EngineFlags())
