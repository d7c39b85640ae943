import re

import pytest

from shardtrain.utils import hardware
from shardtrain.utils.hardware import peak_flops

# Names as drivers report them.
BF16_PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H20": 148e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI325X": 1307.4e12,
    "AMD Instinct MI355X": 2516.6e12,
}


@pytest.mark.parametrize(("name", "peak"), BF16_PEAKS.items())
def test_each_device_has_its_own_dense_peak(name, peak):
    assert peak_flops(name, "bfloat16") == pytest.approx(peak, rel=1e-12)
    assert peak_flops(name, "torch.bfloat16") == peak_flops(name, "bfloat16")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "AMD EPYC",
        "NVIDIA A10G",
        "NVIDIA A1000",
        "NVIDIA L400",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA T400 4GB",
        "Apple M3",
    ],
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name, "bfloat16") is None


def test_a_type_that_a_device_has_no_unit_for_has_no_peak():
    assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12
    assert peak_flops("Tesla T4", "bfloat16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "int8") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "pattern") is None


def test_float8_types_share_one_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", "float8_e4m3fn") == 1979e12


@pytest.mark.parametrize("peak", hardware._PEAKS, ids=lambda peak: peak.pattern)
def test_no_row_holds_a_sparse_number(peak):
    assert re.compile(peak.pattern)
    # Dense fp8 is twice dense 16-bit on every device here; the sparse figure would be four times it.
    if peak.float8:
        assert peak.float8 == pytest.approx(2 * peak.float16, rel=0.02)
    assert peak.float32 < peak.float16
