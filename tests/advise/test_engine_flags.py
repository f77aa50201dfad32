"""Settings of other engines, as their own parsers read them."""

import json
import shlex

from paceline.advise.engine_flags import Speculation, engine_flags, vllm_config
from paceline.vllm.proposer import KEY, ProposerSettings
from paceline.vllm.serve_command import proposer_config

LISTED = ("grammar", "suffix", "ngram")


def test_an_engine_with_one_drafter_gets_the_best_of_the_list() -> None:
    assert Speculation(LISTED, 8).drafter == "suffix"
    assert Speculation((*LISTED, "block"), 8).drafter == "block"
    assert Speculation(("grammar",), 8).drafter is None


def test_vllm_reads_its_setting_from_the_quoted_flag() -> None:
    flag, config = shlex.split(engine_flags(Speculation(("ngram",), 5))["vllm"])
    assert flag == "--speculative-config"
    assert json.loads(config) == {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 5,
    }


def test_vllm_runs_paceline_s_drafters_where_the_advice_is_suffix() -> None:
    ranges = ((1, 4, 8), (5, 16, 2), (17, 64, 0))
    words = shlex.split(engine_flags(Speculation(LISTED, 8, by_batch=ranges))["vllm"])
    assert words[::2] == ["--speculative-config", "--additional-config"]
    assert json.loads(words[1]) == proposer_config(8)
    settings = json.loads(words[3])
    assert settings == {KEY: {"max_batch": 16}}
    alone = shlex.split(engine_flags(Speculation(("suffix",), 8))["vllm"])
    assert json.loads(alone[3]) == {KEY: {"drafters": ["suffix"]}}
    assert len(shlex.split(engine_flags(Speculation(LISTED, 8))["vllm"])) == 2
    for given in (settings, json.loads(alone[3])):
        ProposerSettings(**given[KEY])  # an unknown one is an error


def test_vllm_knows_trained_heads_by_the_names_of_the_export() -> None:
    config = vllm_config(Speculation(("suffix", "block"), 7, "my head"))
    assert config == {"method": "dspark", "model": "my head", "num_speculative_tokens": 7}


def test_vllm_drafts_less_as_the_batch_grows() -> None:
    config = vllm_config(Speculation(("suffix",), 8, by_batch=((1, 4, 8), (5, 16, 2), (17, 64, 0))))
    assert config is not None
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 4, 8], [5, 16, 2], [17, 64, 0]]


def test_sglang_counts_the_last_token_of_the_text() -> None:
    flags = engine_flags(Speculation(LISTED, 8))["sglang"]
    assert flags == "--speculative-algorithm NGRAM --speculative-num-draft-tokens 9"
    flags = engine_flags(Speculation(("model",), 4, "a folder"))["sglang"]
    assert "--speculative-draft-model-path 'a folder' --speculative-num-steps 4" in flags
    assert flags.endswith("--speculative-num-draft-tokens 5")


def test_llama_cpp_takes_a_list_and_short_matches() -> None:
    flags = engine_flags(Speculation((*LISTED, "model"), 8, "draft.gguf"))["llama.cpp"]
    assert flags.startswith("--spec-type ngram-simple,ngram-mod,draft-simple ")
    assert "--spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8" in flags
    assert "--spec-draft-model draft.gguf --spec-draft-n-max 8" in flags


def test_plain_decoding_needs_no_flags() -> None:
    for spec in (Speculation((), 8), Speculation(LISTED, 0)):
        assert engine_flags(spec) == {"vllm": "", "sglang": "", "llama.cpp": ""}
