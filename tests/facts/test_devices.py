"""`plan`, `config check` and the MFU in the log use one table of devices."""

from __future__ import annotations

import pytest

from shardtrain import cli
from shardtrain import config as configs
from shardtrain.facts import devices
from shardtrain.facts.devices import peak_flops
from shardtrain.tools.plan import hardware
from shardtrain.train.preflight import machine

# Name that the driver reports -> name in our table, and dense bfloat16 peak in TFLOP/s. The peak is that of float16 for
# devices without bfloat16 units.
DRIVERS = {
    "NVIDIA A100-SXM4-40GB": ("a100-40gb", 312),
    "NVIDIA A100-SXM4-80GB": ("a100-80gb", 312),
    "NVIDIA A100-PCIE-40GB": ("a100-pcie-40gb", 312),
    "NVIDIA A100 80GB PCIe": ("a100-pcie-80gb", 312),
    "NVIDIA A800-SXM4-80GB": ("a800", 312),
    "NVIDIA H100 80GB HBM3": ("h100", 989.4),
    "NVIDIA H100 PCIe": ("h100-pcie", 756),
    "NVIDIA H100 NVL": ("h100-nvl", 835.5),
    "NVIDIA H200": ("h200", 989.4),
    "NVIDIA H200 NVL": ("h200-nvl", 835.5),
    "NVIDIA H800": ("h800", 989.4),
    "NVIDIA H20": ("h20", 148),
    "NVIDIA GH200 480GB": ("gh200", 989.4),
    "NVIDIA B200": ("b200", 2250),
    "NVIDIA GB200": ("gb200", 2500),
    "NVIDIA B300 SXM6 AC": ("b300", 2250),
    "NVIDIA GB300": ("gb300", 2500),
    "NVIDIA L40S": ("l40s", 362.05),
    "NVIDIA L40": ("l40", 181.05),
    "NVIDIA L4": ("l4", 121),
    "NVIDIA A10": ("a10", 125),
    "NVIDIA A10G": ("a10g", 70),
    "NVIDIA A30": ("a30", 165),
    "NVIDIA A40": ("a40", 149.7),
    "Tesla T4": ("t4", 65),
    "Tesla V100-SXM2-16GB": ("v100-16gb", 125),
    "Tesla V100-SXM3-32GB": ("v100-32gb", 125),
    "Tesla V100-PCIE-16GB": ("v100-pcie-16gb", 112),
    "Tesla V100-PCIE-32GB": ("v100-pcie-32gb", 112),
    "Tesla V100S-PCIE-32GB": ("v100s", 130),
    "NVIDIA RTX A5000": ("rtx-a5000", 111.1),
    "NVIDIA RTX A6000": ("rtx-a6000", 154.8),
    "NVIDIA RTX 6000 Ada Generation": ("rtx-6000-ada", 364.2),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("rtx-pro-6000", 500),
    "NVIDIA GeForce RTX 3090": ("rtx-3090", 71),
    "NVIDIA GeForce RTX 4090": ("rtx-4090", 165.2),
    "NVIDIA GeForce RTX 5090": ("rtx-5090", 209.5),
    "AMD Instinct MI210": ("mi210", 181),
    "AMD Instinct MI250X": ("mi250x", 191.5),
    "AMD Instinct MI300A": ("mi300a", 980.6),
    "AMD Instinct MI300X": ("mi300x", 1307.4),
    "AMD Instinct MI325X": ("mi325x", 1307.4),
    "AMD Instinct MI350X": ("mi350x", 2306.9),
    "AMD Instinct MI355X": ("mi355x", 2516.6),
    "Intel(R) Data Center GPU Max 1550": ("max-1550", 419),
}
UNKNOWN = [
    "", "AMD EPYC", "NVIDIA A1000", "NVIDIA L400", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA T400 4GB", "Apple M3",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
]  # fmt: skip
ROWS = devices.table()["devices"]
TRAINABLE = [
    name
    for name in devices.names()
    if ROWS[name].get("torch_device", "cuda") in devices.ACCELERATOR_TYPES
]
NO_DRIVER_NAME = {"h100-96gb"}
"""Devices whose driver name is not published."""


@pytest.mark.parametrize("driver", DRIVERS)
def test_driver_name_selects_its_row(driver: str) -> None:
    row, peak = DRIVERS[driver]
    assert devices.find(driver) == row

    dtype = "bfloat16" if "bfloat16" in ROWS[row]["flops"] else "float16"
    assert (
        peak_flops(driver, f"torch.{dtype}")
        == peak_flops(row, dtype)
        == pytest.approx(peak * 1e12, rel=1e-12)
    )


def test_every_training_device_has_a_driver_name() -> None:
    assert {row for row, _ in DRIVERS.values()} | NO_DRIVER_NAME == set(TRAINABLE)


@pytest.mark.parametrize("name", devices.names())
def test_plan_check_and_mfu_agree_on_a_device(name: str) -> None:
    """The same memory and peaks are used, or all report that training does not support the device."""
    device = hardware.find(name)
    assert device.name == name

    loaded = configs.load(None, [])
    if name in TRAINABLE:
        checked = machine.named(name, loaded, 1)
        assert (checked.memory_bytes, checked.device) == (device.memory_bytes, device.torch_device)
        assert {dtype: peak_flops(name, dtype) for dtype in device.flops} == device.flops
    else:
        with pytest.raises(configs.ConfigError, match="is not a device that train supports"):
            machine.named(name, loaded, 1)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert devices.find(name) is None
    assert peak_flops(name, "bfloat16") is None


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA A100-SXM4-80GB", "int8", None),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", 1978.9e12),
        ("cpu", "float32", None),
    ],
)
def test_a_dtype_without_units_has_no_peak(name: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(name, dtype) == peak


@pytest.mark.parametrize("name", TRAINABLE)
def test_no_row_has_a_sparse_figure(name: str) -> None:
    """Dense float8 is twice dense 16-bit on these devices; the sparse figure would be four times it."""
    flops = ROWS[name]["flops"]
    if "float8" in flops:
        assert flops["float8"] == pytest.approx(2 * flops["float16"], rel=0.02)
    assert flops["float32"] < flops["float16"]


def test_memory_of_an_h100_is_pytorchs_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware.find("h100").memory_gib == 79.1
    command = ["config", "check", "llama3_8b", "--training.seq_len=131072", "--for-machine"]
    assert cli.main([*command, "NVIDIA H100 80GB HBM3", "--nproc=1"]) == 2
    assert "h100 has 79.10 GiB" in capsys.readouterr().out
