"""Settings: where a value comes from, and what each mistake is told."""

import pytest

from hasten.base.config import Config, make_config, parse_memory
from hasten.base.errors import ConfigError


def test_an_argument_wins_over_the_environment_and_that_over_the_default():
    environ = {"HASTEN_LEVEL": "1", "HASTEN_MEMORY": "50%"}
    config = make_config(environ, level=2)
    assert (config.level, config.memory, config.precision) == (2, 0.5, "follow")
    assert config.sources["level"] == "argument"
    assert config.sources["memory"] == "HASTEN_MEMORY"
    assert config.sources["precision"] == "default"


@pytest.mark.parametrize(("text", "level"), [("1", 3), ("0", 0), ("false", 0)])
def test_the_name_that_users_of_ascend_know_switches_fusion(text, level):
    config = make_config({"ENABLE_FUSED_TRANSFORMER": text})
    assert config.level == level
    assert config.sources["level"] == "ENABLE_FUSED_TRANSFORMER"


def test_the_project_name_wins_over_the_alias():
    assert make_config({"ENABLE_FUSED_TRANSFORMER": "0", "HASTEN_LEVEL": "1"}).level == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("6GB", 6 * 10**9),
        ("6 GiB", 6 * 2**30),
        ("512MiB", 2**29),
        ("1.5e9", 1_500_000_000),
        ("75%", 0.75),
        (0.5, 0.5),
        (3e9, 3_000_000_000),
    ],
)
def test_memory_is_bytes_or_a_share(given, expected):
    assert parse_memory(given) == expected


@pytest.mark.parametrize("given", ["much", "-1GB", 0, -3])
def test_other_memory_is_refused(given):
    with pytest.raises(ConfigError, match="memory"):
        parse_memory(given)


def test_a_share_of_memory_counts_from_the_limit_of_this_process():
    assert make_config({}, memory=1.0).memory_bytes() > 2**20
    assert make_config({}, memory="2GB").memory_bytes() == 2 * 10**9
    assert make_config({}).memory_bytes() is None


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'level'"):
        make_config({}, levle=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": 4},
        {"level": -1},
        {"precision": "fp8"},
        {"dynamic_shape": (512, 128)},
        {"dynamic_shape": (0, 8)},
    ],
)
def test_a_value_out_of_range_names_field_value_and_source(wrong):
    (field,) = wrong
    with pytest.raises(ConfigError, match=rf"{field} = .*argument"):
        make_config({}, **wrong)


def test_the_environment_is_named_when_it_is_wrong():
    with pytest.raises(ConfigError, match="HASTEN_LEVEL"):
        make_config({"HASTEN_LEVEL": "fast"})


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().level = 1


def test_a_rule_of_ours_is_told_in_our_words() -> None:
    with pytest.raises(ConfigError, match=r"^dynamic_shape = .* \(from argument\): must be \(low, high\)"):
        make_config({}, dynamic_shape=(9, 3))
    with pytest.raises(ConfigError, match=r"^level = 'x' \(from HASTEN_LEVEL\): "):
        make_config({"HASTEN_LEVEL": "x"})
