"""Every public name loads, and is listed wherever it must be."""

import paceline


def test_every_public_name_loads() -> None:
    assert set(paceline.__all__) == set(paceline._HOME)
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(paceline, "Nothing")
