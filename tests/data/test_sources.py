"""Laws of the datasets: a deterministic order of documents, and errors that name the option and the file."""

from __future__ import annotations

import pytest

from shardtrain.data import sources
from shardtrain.data.sources import python_stdlib, text
from shardtrain.errors import ConfigError, DataError


def test_a_dataset_is_found_by_the_name_of_its_file():
    assert sources.find("text") is text
    assert {"python_stdlib", "text"} <= set(sources.names())


@pytest.mark.parametrize("name", ["python_stdlip", "__init__", "../text", "os", ""])
def test_an_unknown_dataset_lists_those_that_exist(name):
    with pytest.raises(ConfigError, match=r"training.dataset=.*python_stdlib, .*text"):
        sources.find(name)


def test_a_near_name_is_offered():
    with pytest.raises(ConfigError, match=r'validation.dataset="txt" .*did you mean "text"'):
        sources.find("txt", option="validation.dataset")


def test_the_standard_library_is_the_same_every_time_and_large_enough():
    first, second = list(python_stdlib.documents()), list(python_stdlib.documents())
    assert first == second
    assert sum(map(len, first)) > 2**20
    assert any("class OrderedDict" in document for document in first)


def test_the_standard_library_leaves_out_packages_and_tests_and_sorts_the_rest(tmp_path):
    for path in ("b.py", "a/z.py", "a/b.txt", "site-packages/x.py", "a/tests/t.py", "test/t.py", "idlelib/i.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    assert list(python_stdlib._texts(tmp_path)) == ["a/z.py", "b.py"]


def test_the_standard_library_stops_at_its_limit(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(name * 10)
    monkeypatch.setattr(python_stdlib, "MAX_BYTES", 25)
    assert list(python_stdlib._texts(tmp_path)) == ["a" * 10, "b" * 10]


def test_a_missing_standard_library_says_what_to_do(tmp_path):
    for root in (tmp_path, tmp_path / "python311.zip"):
        with pytest.raises(DataError, match=r'found no .py files in .*training.dataset="text"'):
            list(python_stdlib._texts(root))


def test_the_standard_library_takes_no_path():
    with pytest.raises(ConfigError, match=r'training.dataset_path="x" has no effect'):
        python_stdlib.documents("x")


def test_a_text_file_is_one_document_with_its_line_ends_and_without_its_mark(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo \xc3\xa9")
    assert list(text.documents(str(tmp_path / "a.md"))) == ["one\r\n\r\ntwo é"]


def test_a_folder_gives_its_text_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    for path in ("c.txt", "a.txt", "b/x.txt", "ignored.md"):
        (tmp_path / path).write_text(path)
    assert list(text.documents(str(tmp_path))) == ["a.txt", "b/x.txt", "c.txt"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_wrong_byte_is_named_by_its_offset_in_the_file(tmp_path, mark):
    (tmp_path / "a.txt").write_bytes(mark + b"ab\xff")
    with pytest.raises(DataError, match=rf"a.txt\" is not UTF-8 at byte {len(mark) + 2} \(0xff\)"):
        list(text.documents(str(tmp_path)))


def test_missing_and_empty_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"training.dataset_path is not set"):
        text.documents(None)
    with pytest.raises(DataError, match=r"validation.dataset_path=.* does not exist"):
        text.documents(str(tmp_path / "no"), option="validation.dataset_path")
    with pytest.raises(DataError, match=r"folder without \*.txt"):
        text.documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a.txt\" is empty"):
        list(text.documents(str(tmp_path)))
