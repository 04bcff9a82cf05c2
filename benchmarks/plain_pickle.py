"""What a pickle says, without doing it: plain containers, numbers, texts, arrays, and records of the classes named.

A pickle is a program that may call anything. This is no unpickler: it walks through the program's opcodes, knows the
few of them that plain data need, and has nothing that imports a name, calls one or makes an object. A class that the
reader has listed becomes a `Record` of what the pickle would make it from; every other name is refused.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
"""How joblib announces an array, whose bytes follow in the midst of the pickle."""
KINDS = ("f4", "f8", "i4", "i8")
"""Elements that an array may have."""
MAX_BYTES = 32 << 20
"""Of a pickle, unless more is asked for."""
MAX_ALIGNMENT = 64

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
}
"""Opcodes whose argument is the value."""
_EMPTY: dict[str, Any] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Refused(ValueError):
    """A pickle that is not of plain data, or not whole."""


@dataclass(slots=True, kw_only=True)
class Record:
    """An object of a listed class, as the pickle describes it: nothing of the class is used."""

    name: str
    """module.class."""
    arguments: tuple[Any, ...] = field(default=(), repr=False)
    """What it would be made with."""
    state: Any = field(default=None, repr=False)
    """What it would then be given: its attributes, mostly."""
    items: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Of a mapping, what would be put into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    """A listed class, before anything is made of it."""

    name: str


def read_plain(data: bytes, *, classes: Collection[str] = (), most: int = MAX_BYTES) -> Any:
    """What the pickle `data` says; `classes` lists names, module.class, that may stand in it.

    Raises:
        Refused: it is larger than `most` bytes, is cut off, or holds an opcode, a name or an array beyond those known.
    """
    if len(data) > most:
        raise Refused(f"a pickle of {len(data)} bytes is larger than the {most} that are read; it is another file.")
    file = io.BytesIO(data)
    try:
        found = _Walk(file, frozenset(classes)).result()
    except Refused:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"no whole pickle of plain data: {reason} (near byte {file.tell()} of {len(data)}).") from error
    if file.tell() != len(data):
        raise Refused(f"{len(data) - file.tell()} bytes follow the end of the pickle; it is another file.")
    return found


class _Walk:
    """The stack and the memo of a pickle's program, with plain values on them."""

    def __init__(self, file: io.BytesIO, classes: frozenset[str]) -> None:
        self._file, self._classes = file, classes
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """Walks to STOP; what is then on the stack."""
        for opcode, argument, _ in pickletools.genops(self._file):
            if opcode.name == "STOP":
                (found,) = self._stack
                return found
            self._do(opcode.name, argument)
        raise Refused("the pickle has no end; get it anew.")

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            stack.append(tuple(self._last(_TUPLES[name])))
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            self._extend(self._last(1) if name == "APPEND" else self._marked())
        elif name in ("SETITEM", "SETITEMS"):
            self._put(self._last(2) if name == "SETITEM" else self._marked())
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(self._named(argument.split(" ") if name == "GLOBAL" else self._last(2)))
        elif name in ("NEWOBJ", "REDUCE"):
            stack.append(_record(*self._last(2)))
        elif name == "BUILD":
            self._build(*self._last(2))
        else:
            raise Refused(f"opcode {name} is none that plain data need; the pickle is another file, or hostile.")

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) - (self._marks[-1] if self._marks else 0) < count:
            raise Refused(f"an opcode takes {count} values where fewer are; the pickle is damaged.")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def _marked(self) -> list[Any]:
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _extend(self, values: list[Any]) -> None:
        onto = self._stack[-1]
        if type(onto) is not list:
            raise Refused(f"values are appended to {type(onto).__name__}, which is no list; the pickle is damaged.")
        onto += values

    def _put(self, flat: list[Any]) -> None:
        into = self._stack[-1]
        mapping = into.items if type(into) is Record else into
        if type(mapping) is not dict:
            raise Refused(f"items are put into {type(into).__name__}, which is no mapping; the pickle is damaged.")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if type(key) not in (str, int):
                raise Refused(f"a key is {type(key).__name__}, neither text nor number; the pickle is damaged.")
            mapping[key] = value

    def _named(self, parts: list[Any]) -> _Name:
        name = ".".join(str(part) for part in parts)
        if name not in self._classes:
            raise Refused(f"the pickle names {name[:100]!r}, which is none of {', '.join(sorted(self._classes))}: it "
                          f"is another file, or hostile.")
        return _Name(name=name)

    def _build(self, made: Any, state: Any) -> None:
        if type(made) is not Record:
            raise Refused(f"a state is given to {type(made).__name__}, which is no record; the pickle is damaged.")
        made.state = state
        self._stack.append(_array(state, self._file) if made.name == ARRAY else made)


def _record(named: Any, arguments: Any) -> Record:
    if type(named) is not _Name or type(arguments) is not tuple:
        raise Refused(f"{type(named).__name__} is made or called, which is no listed class; the pickle is hostile.")
    return Record(name=named.name, arguments=arguments)


def _array(state: Any, file: io.BytesIO) -> Any:
    """The array that joblib has written behind what announces it: shape, order, elements, and filling before them."""
    shape, kind, order = state["shape"], state["dtype"].arguments[0], state["order"]
    little = (state["dtype"].state or (3, "<"))[1]
    known = kind in KINDS and little == "<" and order in ("C", "F") and type(shape) is tuple
    if not (known and all(type(side) is int and side >= 0 for side in shape)):
        raise Refused(f"an array of {kind!r}, order {order!r} and shape {shape!r} is none that is read here.")
    if (alignment := state.get("numpy_array_alignment_bytes")) is not None:
        filling = file.read(1)[0]
        if filling > min(alignment, MAX_ALIGNMENT) or file.read(filling) != b"\xff" * filling:
            raise Refused(f"an array begins with {filling} bytes of filling that are none; the pickle is damaged.")
    dtype = np.dtype(f"<{kind}")
    size = dtype.itemsize * _product(shape)
    raw = file.read(size)
    if len(raw) != size:
        raise Refused(f"an array of shape {shape} ends after {len(raw)} of {size} bytes; get the file anew.")
    return np.frombuffer(raw, dtype).reshape(shape, order=order).copy()


def _product(sides: tuple[int, ...]) -> int:
    total = 1
    for side in sides:
        total *= side
    return total
