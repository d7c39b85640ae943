"""Device tables: each row names its source, and impossible numbers are rejected in one line."""

from __future__ import annotations

import pytest

from shardtrain import config as configs
from shardtrain.facts import devices
from shardtrain.tools.plan import hardware, planning
from shardtrain.utils.errors import ConfigError

ROW = """
[devices.mine]
memory_gib = 24
memory_bytes_per_second = 1e12
devices_per_node = 4
link = "pcie4"
network = "ethernet-100g"
source = "its box"
[devices.mine.flops]
bfloat16 = 100e12
"""


@pytest.mark.parametrize("name", devices.names())
def test_each_device_of_the_package_is_plausible_and_names_its_sources(name):
    device = hardware.find(name)
    assert device.source
    assert device.link.source
    assert device.network.source

    half = "bfloat16" if "bfloat16" in device.flops else "float16"
    assert device.peak(half) >= device.peak("float32")
    assert device.memory_bytes > 2**30


def test_short_names_select_the_common_devices():
    assert hardware.find("A100").memory_gib > hardware.find("a100-40").memory_gib


def test_an_unknown_device_lists_the_known_ones_and_how_to_add_one():
    with pytest.raises(ConfigError, match=r"did you mean h100.*b200.*mi300x.*\[devices.NAME\]"):
        hardware.find("h10")


def test_a_user_defined_device_is_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(ROW)
    device = hardware.find(str(path))

    assert (device.name, device.devices_per_node, device.link.name) == ("mine", 4, "pcie4")
    assert device.peak("bfloat16") == 100e12
    with pytest.raises(ConfigError, match="float8"):
        device.peak("float8")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("memory_gib = 24", "memory_gib = -24", "memory_gib"),
        ("memory_gib = 24", "memory_gib = nan", "memory_gib"),
        ("memory_gib = 24", 'memory_gib = "24"', "memory_gib"),
        ("bfloat16 = 100e12", "bfloat16 = 100", "TFLOPs"),
        ("bfloat16 = 100e12", "bfloat16 = 1e30", "flops.bfloat16"),
        ("devices_per_node = 4", "devices_per_node = 0", "devices_per_node"),
        ('link = "pcie4"', 'link = "string"', "known link"),
        ('source = "its box"', "", "source"),
        ('source = "its box"', 'source = "its box"\nmemory_efficiency = 2', "memory_efficiency"),
        ('source = "its box"', 'source = "its box"\ncolour = "red"', "colour"),
    ],
)
def test_impossible_numbers_are_refused_and_named(tmp_path, old, new, key):
    path = tmp_path / "mine.toml"
    path.write_text(ROW.replace(old, new))
    with pytest.raises(ConfigError, match=key) as error:
        hardware.find(str(path))
    assert "\n" not in str(error.value)


def test_a_missing_file_or_invalid_toml_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        hardware.find(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[")
    with pytest.raises(ConfigError, match="not TOML"):
        hardware.find(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = 3\n", "0 tables"),
        ("[devices]\nmine = 3\n", "0 tables"),
        ("links = 3\n[devices.mine]\nlink = ['pcie4']\n", "is missing"),
    ],
)
def test_a_device_file_with_another_structure_is_rejected(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        hardware.find(str(path))


def test_without_a_switch_two_devices_use_only_part_of_the_link(tmp_path):
    path = tmp_path / "mine.toml"
    links = '[links.direct]\nbytes_per_second = 300e9\nlatency_seconds = 1e-6\nsource = "its board"\npeers = 3\n'
    path.write_text(ROW.replace('"pcie4"', '"direct"') + links)
    direct = hardware.find(str(path))
    path.write_text(path.read_text().replace("peers = 3", "peers = 0"))
    switched = hardware.find(str(path))

    # With direct links to three peers, two devices can only use a third of their links for each other.
    config = configs.load("llama3_8b", ["--parallelism.tensor_parallel_degree", "2"]).config
    direct_seconds = planning.make(config, 4, direct).time.costs["tensor parallel"]
    switched_seconds = planning.make(config, 4, switched).time.costs["tensor parallel"]
    assert direct_seconds == pytest.approx(3 * switched_seconds, rel=0.01)

    path.write_text(path.read_text().replace("peers = 0", "peers = 1.5"))
    with pytest.raises(ConfigError, match=r"links.direct.peers=1.5 is not a whole number"):
        hardware.find(str(path))
