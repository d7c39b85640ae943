"""The processor's name, from the files of several kernels."""

from __future__ import annotations

import platform

import pytest

from shardtrain.utils.processor import processor_name

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model name\t: AMD EPYC 9354 32-Core Processor
flags\t\t: fpu avx2 avx512f
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 0

processor\t: 1
CPU implementer\t: 0x41
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86, "AMD EPYC 9354 32-Core Processor"),
        (
            GRAVITON,
            "aarch64, CPU implementer 0x41, CPU part 0xd4f, CPU variant 0x0, CPU revision 0",
        ),
        ("", "aarch64"),
    ],
)
def test_a_processor_is_named(tmp_path, monkeypatch, text, name):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert processor_name(path) == name


def test_without_cpuinfo_the_architecture_is_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert processor_name(tmp_path / "missing") == "arm64"
