import pytest

from shardtrain.utils import units


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5 kib", 1536),
        ("0", 0),
        (7, 7),
        ("2TiB", 2**41),
        ("12 b", 12),
    ],
)
def test_sizes_are_parsed_with_binary_and_decimal_units(text, num_bytes):
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1 gibbon", "-3 GiB", "1e9", "nan", "1.2.3 GB"])
def test_invalid_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="80 GiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        (1.5, 1.5),
        ("1.5s", 1.5),
        ("1h30m", 5400),
        ("2d 4h", 187200),
        ("250ms", 0.25),
        ("12:30:00", 45000),
        ("10min", 600),
    ],
)
def test_durations_of_people_and_slurm_are_parsed(text, seconds):
    assert units.parse_seconds(text) == pytest.approx(seconds, rel=1e-12)  # float64 rounding


@pytest.mark.parametrize(
    "text", ["", "soon", "1h30", "1x", "-5s", "12:99:00", float("nan"), float("inf")]
)
def test_invalid_duration_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        units.parse_seconds(text)


def test_counts_keep_every_digit():
    # As a float this number would lose its last digit.
    assert units.parse_count("9007199254740993") == 9007199254740993
    assert units.parse_count("6.738415616B") == 6738415616


@pytest.mark.parametrize("text", ["8 billion", "B", "1,5.B", ""])
def test_invalid_count_is_refused(text):
    with pytest.raises(ValueError, match="count"):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (3599.7, "1h00m"),
        (86399.9, "1d00h"),
        (-75, "-1m15s"),
    ],
)
def test_formatted_durations_never_have_60_of_a_unit(seconds, text):
    assert units.format_seconds(seconds) == text


def test_non_finite_duration_is_formatted_as_unknown():
    assert units.format_seconds(float("inf")) == "-"
    assert units.format_seconds(float("nan")) == "-"


@pytest.mark.parametrize("num_bytes", [2**10, 2**20, 3 * 2**30, 5 * 2**40])
def test_formatted_size_is_parsed_back(num_bytes):
    assert units.parse_bytes(units.format_bytes(num_bytes)) == num_bytes
