"""The standard library as a dataset: the same rows every time, without files that differ between machines."""

from __future__ import annotations

import pytest

from shardtrain.data.sources import Request, Table, every_row, python_stdlib
from shardtrain.utils.errors import ConfigError, DataError


def texts(source):
    return [row["text"] for _, row in every_row(source)]


def test_standard_library_is_deterministic_and_large_enough():
    first, second = (python_stdlib.open_source(Request()) for _ in range(2))
    assert isinstance(first, Table)
    assert texts(first) == texts(second)
    assert first.files() == second.files()
    assert len(first.files()) == 1
    assert 2**20 < sum(map(len, texts(first))) <= first.total_bytes <= python_stdlib.MAX_BYTES
    assert any("class OrderedDict" in text for text in texts(first))
    assert first.place(0).endswith(".py")

    first.check_unchanged()


def test_standard_library_skips_packages_and_tests_and_is_sorted(tmp_path):
    for path in (
        "b.py",
        "a/z.py",
        "a/b.txt",
        "site-packages/x.py",
        "a/tests/t.py",
        "test/t.py",
        "idlelib/i.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)

    assert texts(python_stdlib.open_folder(tmp_path)) == ["a/z.py", "b.py"]


def test_standard_library_stops_at_its_size_limit(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(name * 10)
    monkeypatch.setattr(python_stdlib, "MAX_BYTES", 25)
    assert texts(python_stdlib.open_folder(tmp_path)) == ["a" * 10, "b" * 10]


def test_fingerprint_covers_every_byte(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    first = python_stdlib.open_folder(tmp_path).files()
    (tmp_path / "a.py").write_text("x = 2")
    assert python_stdlib.open_folder(tmp_path).files() != first


def test_invalid_utf_8_is_replaced(tmp_path):
    (tmp_path / "a.py").write_bytes(b"a\xffb")
    assert texts(python_stdlib.open_folder(tmp_path)) == ["a\ufffdb"]


def test_missing_standard_library_is_reported_with_the_fix(tmp_path):
    for root in (tmp_path, tmp_path / "python311.zip"):
        with pytest.raises(DataError, match=r'found no .py files in .*training.dataset="text"'):
            python_stdlib.open_folder(root)


def test_standard_library_accepts_no_path():
    with pytest.raises(ConfigError, match=r'training.dataset_path="x" has no effect'):
        python_stdlib.open_source(Request("x"))
