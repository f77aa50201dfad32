import pickle
from dataclasses import replace

import pytest

from paceline.config import (
    ACCEPT_RULES,
    EngineConfig,
    SamplingParams,
    SpecConfig,
    require_between,
    require_min,
    require_positive,
    require_whole,
    settings,
)
from paceline.errors import SettingError, UsageError


def test_unknown_key_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'temprature'; did you mean 'temperature'.*top_k"):
        settings(SamplingParams, {"temprature": 1})


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (SamplingParams, {"temperature": -1}),
        (SamplingParams, {"top_p": 0}),
        (SamplingParams, {"max_tokens": 0}),
        (SamplingParams, {"stop": ("",)}),
        (SamplingParams, {"seed": 2**64}),
        (SamplingParams, {"temperature": float("nan")}),
        (SamplingParams, {"seed": 7.0}),
        (SamplingParams, {"top_k": 2.5}),
        (SamplingParams, {"temperature": "hot"}),
        (SamplingParams, {"temperature": 1e-40}),
        (SamplingParams, {"repetition_penalty": 1e-50}),
        (SamplingParams, {"logit_bias": {"x": 1.0}}),
        (SamplingParams, {"logit_bias": ((1, 2, 3),)}),
        (SamplingParams, {"stop_tokens": ("six",)}),
        (SamplingParams, {"stop": 5}),
        (SpecConfig, {"max_draft": 65}),
        (SpecConfig, {"accept": "lossless"}),
        (SpecConfig, {"accept": "block", "tree_width": 2}),
        (EngineConfig, {"dtype": "int3"}),
        (EngineConfig, {"cache_mb": 0}),
    ],
)
def test_values_out_of_range_name_the_setting(cls: type, given: dict[str, object]) -> None:
    with pytest.raises(SettingError) as caught:
        settings(cls, given)
    error, name = caught.value, list(given)[-1]
    assert error.setting == name
    assert str(error).startswith(f"{name}=")
    assert str(error).endswith(f" is not usable: expected {error.expected}")


def test_a_setting_error_is_data() -> None:
    error = SettingError("max_draft", 65, "0 to 64", "longer drafts never pay")
    assert str(error) == "max_draft=65 is not usable: expected 0 to 64; longer drafts never pay"
    assert str(error.renamed("num_speculative_tokens")).startswith("num_speculative_tokens=65 is")
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.setting, copied.value, copied.expected, copied.hint) == error.args
    assert str(copied) == str(error)


def test_texts_of_the_user_are_not_repeated() -> None:
    with pytest.raises(SettingError) as caught:
        SamplingParams(stop=("secret", ""))
    assert str(caught.value) == "stop=... is not usable: expected texts, none empty"


class Limits:
    count, share, rate, lengths = 3, 0.5, 0.1, (1, 2)


def test_validators_name_the_setting_and_the_bound() -> None:
    limits = Limits()
    require_min(limits, count=3)
    require_between(limits, 0, 1, "share", "rate")
    require_positive(limits, "rate")
    require_whole(limits, "count", "lengths")
    with pytest.raises(SettingError, match="count=3 is not usable: expected 4 or more"):
        require_min(limits, count=4)
    with pytest.raises(SettingError, match=r"share=0.5 is not usable: expected 0 to 0.2"):
        require_between(limits, 0, 0.2, "share")
    with pytest.raises(SettingError, match=r"rate=0.1 is not usable: expected whole numbers"):
        require_whole(limits, "rate")


def test_only_typical_is_lossy() -> None:
    assert [a for a in ACCEPT_RULES if SpecConfig(accept=a).lossy] == ["typical"]


def test_lists_texts_and_mappings_are_taken_as_they_come() -> None:
    params = SamplingParams(stop="END", logit_bias={"5": -1.0}, stop_tokens=[6])  # type: ignore[arg-type]
    assert (params.stop, params.logit_bias, params.stop_tokens) == (("END",), ((5, -1.0),), (6,))
    assert SpecConfig(["suffix", "ngram", "suffix"]).drafters == ("suffix", "ngram")  # type: ignore[arg-type]


def test_num_speculative_tokens_is_a_second_name_of_max_draft() -> None:
    spec = SpecConfig(num_speculative_tokens=3)
    assert spec == SpecConfig(max_draft=3) == SpecConfig(max_draft=3, num_speculative_tokens=3)
    with pytest.raises(SettingError, match="max_draft is 4; give one of them"):
        SpecConfig(max_draft=4, num_speculative_tokens=3)
    assert replace(spec, max_draft=5).max_draft == 5
    assert replace(spec, tree_width=2).max_draft == 3
    with pytest.raises(SettingError, match="max_draft=65"):
        SpecConfig(num_speculative_tokens=65)


def test_minus_1_turns_top_k_off_as_0_does() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams()
    with pytest.raises(SettingError, match="expected 0 or -1"):
        SamplingParams(top_k=-2)
