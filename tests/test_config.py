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
