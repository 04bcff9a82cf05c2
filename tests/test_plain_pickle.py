"""The reader of pickles: plain data come out as they went in, and nothing that a pickle names is imported or run."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import pickletools
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plain_pickle import ARRAY, Record, Refused, read_plain

PLAIN: dict[str, Any] = {"a": [1, -2, 3.25, (None, True, "é")], "b": {7: (), "x": [[], {}]}, "big": 2**70}


class Calls:
    """Pickles to a call of anything."""

    def __init__(self, called: Any, *arguments: Any) -> None:
        self.called, self.arguments = called, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.called, self.arguments


def hostile(mark: Path) -> dict[str, bytes]:
    """Pickles that make the file `mark` when they are loaded."""
    command, code = f"echo > {mark}", f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": pickle.dumps(Calls(os.system, command)),
        "builtins.eval": pickle.dumps(Calls(eval, code)),
        "builtins.exec in the depth": pickle.dumps({"a": [1, (Calls(exec, code),)]}),
        "pathlib": pickle.dumps(Calls(Path.touch, mark)),
        "getattr": pickle.dumps(Calls(getattr, Calls(__import__, "os"), "system")),
        "text opcodes": f"cos\nsystem\n(S'{command}'\ntR.".encode(),
        "INST": f"(S'{command}'\nios\nsystem\n.".encode(),
        "OBJ": f"(cos\nsystem\nS'{command}'\no.".encode(),
        "by text": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(command)]) + command.encode() + b"\x85R.",
    }


@pytest.mark.parametrize("kind", list(hostile(Path())))
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = hostile(mark)[kind]
    with pytest.raises(Refused) as said:
        read_plain(data, classes=["collections.OrderedDict"])
    assert len(str(said.value).splitlines()) == 1
    assert not mark.exists()
    if kind not in ("getattr",):
        pickle.loads(data)
        assert mark.exists(), "the pickle is as hostile as it should be"


def test_even_a_listed_function_is_only_written_down(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    name = f"{os.system.__module__}.system"
    found = read_plain(hostile(mark)["os.system"], classes=[name])
    assert (found.name, found.arguments) == (name, (f"echo > {mark}",))
    assert not mark.exists()


def test_a_class_that_is_not_listed_is_refused_by_name() -> None:
    data = pickle.dumps(Counter("aab"))
    with pytest.raises(Refused, match=r"names 'collections\.Counter', which is none of collections\.OrderedDict"):
        read_plain(data, classes=["collections.OrderedDict"])
    assert read_plain(data, classes=["collections.Counter"]).arguments == ({"a": 2, "b": 1},)


def test_what_is_listed_is_a_record_of_what_it_would_be_made_from() -> None:
    classes = ["collections.OrderedDict", "collections.defaultdict", "builtins.int"]
    ordered, counted = read_plain(pickle.dumps((OrderedDict(x=3), defaultdict(int, y=4)), 3), classes=classes)
    assert (ordered.name, ordered.items) == ("collections.OrderedDict", {"x": 3})
    assert counted.items == {"y": 4}
    assert counted.arguments[0].name == "builtins.int"
    assert type(ordered) is Record


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_come_out_as_they_went_in(protocol: int) -> None:
    assert read_plain(pickle.dumps(PLAIN, protocol)) == PLAIN


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text("ab"), inner),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([2, 4, 5]))
def test_any_plain_data_come_out_as_they_went_in(value: Any, protocol: int) -> None:
    assert read_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_is_cut_off_anywhere_is_one_message(protocol: int) -> None:
    data = pickle.dumps(PLAIN, protocol)
    for end in range(len(data)):
        with pytest.raises(Refused) as said:
            read_plain(data[:end])
        assert len(str(said.value).splitlines()) == 1


@given(st.binary(max_size=40) | st.lists(st.sampled_from([o.code for o in pickletools.opcodes]), max_size=12).map(
    lambda codes: "".join(codes).encode("latin-1")))
def test_garbage_is_refused_or_plain(data: bytes) -> None:
    with suppress(Refused):
        read_plain(data)


def test_what_is_too_large_or_goes_on_is_refused() -> None:
    data = pickle.dumps(PLAIN)
    with pytest.raises(Refused, match=rf"a pickle of {len(data)} bytes is larger than the 20 that are read"):
        read_plain(data, most=20)
    with pytest.raises(Refused, match="3 bytes follow the end"):
        read_plain(data + b"abc")
    with pytest.raises(Refused, match="no whole pickle"):  # a text of 4 GiB that is not there
        read_plain(b"\x80\x03X\xff\xff\xff\xffabc.")


def test_a_key_or_a_target_of_another_kind_is_refused() -> None:
    with pytest.raises(Refused, match="a key is tuple"):
        read_plain(pickle.dumps({(1, 2): 3}))
    with pytest.raises(Refused, match="appended to dict"):
        read_plain(b"\x80\x02}K\x01a.")
    with pytest.raises(Refused, match="put into list"):
        read_plain(b"\x80\x02]K\x01K\x02s.")
    with pytest.raises(Refused, match="a state is given to dict"):
        read_plain(b"\x80\x02}}b.")
    with pytest.raises(Refused, match="str is made or called"):
        read_plain(b"\x80\x02X\x01\x00\x00\x00a)R.")


ARRAY_CLASSES = [ARRAY, "numpy.ndarray", "numpy.dtype"]


def with_arrays(value: Any) -> bytes:
    joblib = pytest.importorskip("joblib", reason="the extra movies is not installed")
    out = io.BytesIO()
    joblib.dump(value, out)
    return out.getvalue()


def test_joblibs_arrays_are_read_in_the_midst_of_a_pickle() -> None:
    matrix = np.arange(12, dtype=np.float64).reshape(3, 4) / 7
    given = {"a": matrix, "n": 3, "b": [np.asfortranarray(matrix.astype(np.float32)), np.array([2, -5])], "c": "end"}
    data = with_arrays(given)
    found = read_plain(data, classes=ARRAY_CLASSES)
    np.testing.assert_array_equal(found["a"], matrix)
    np.testing.assert_array_equal(found["b"][0], matrix.astype(np.float32))
    np.testing.assert_array_equal(found["b"][1], [2, -5])
    assert (found["n"], found["c"], list(found)) == (3, "end", ["a", "n", "b", "c"])
    for end in range(0, len(data), 7):
        with pytest.raises(Refused):
            read_plain(data[:end], classes=ARRAY_CLASSES)


def test_an_array_of_objects_is_refused_with_what_hides_in_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = with_arrays({"a": np.array([Calls(os.system, f"echo > {mark}")], dtype=object)})
    with pytest.raises(Refused, match="an array of 'O8'"):
        read_plain(data, classes=ARRAY_CLASSES)
    assert not mark.exists()


def test_nothing_that_imports_or_calls_is_in_the_reader() -> None:
    source = (Path(__file__).parents[1] / "benchmarks" / "plain_pickle.py").read_text("utf-8")
    names = {"eval", "exec", "__import__", "getattr", "import_module", "compile"} & set(dir(builtins)) | {"importlib"}
    assert not [name for name in names if f"{name}(" in source or f"import {name}" in source]
    assert "import pickle\n" not in source
