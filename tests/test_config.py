import pytest

from paceline.config import ACCEPT_RULES, EngineConfig, SamplingParams, SpecConfig, settings
from paceline.errors import SettingError


def test_unknown_key_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"'temprature'; did you mean 'temperature'.*top_k"):
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
    with pytest.raises(SettingError, match=list(given)[-1]):
        settings(cls, given)


def test_only_typical_is_lossy() -> None:
    assert [a for a in ACCEPT_RULES if SpecConfig(accept=a).lossy] == ["typical"]


def test_lists_texts_and_mappings_are_taken_as_they_come() -> None:
    params = SamplingParams(stop="END", logit_bias={"5": -1.0}, stop_tokens=[6])  # type: ignore[arg-type]
    assert (params.stop, params.logit_bias, params.stop_tokens) == (("END",), ((5, -1.0),), (6,))
    assert SpecConfig(["suffix", "ngram", "suffix"]).drafters == ("suffix", "ngram")  # type: ignore[arg-type]
