"""Every dtype and shape there and back, the bytes of a file, and headers from strangers."""

import contextlib
import io
import json
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from experiments import safetensors
from experiments.errors import UserError
from experiments.safetensors import Shape, open_folder, read_header, write, write_folder

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
SHAPES = [(3, 5), (), (0,), (7, 0, 2), (1, 3, 2, 5)]
INDEX = "model.safetensors.index.json"


def noise(shape, dtype, seed=0):
    """Random bits, NaNs among them."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def shapes(arrays):
    return {name: Shape(array.dtype, array.shape) for name, array in arrays.items()}


def written(path, arrays):
    write(path, shapes(arrays), arrays.__getitem__)
    return read_header(path)


def assert_same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


@contextlib.contextmanager
def takes_at_most(nbytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def refused(function, *arguments):
    """The one line that an error is."""
    with pytest.raises(UserError, match=r"^[^\n]{1,700}$") as caught:
        function(*arguments)
    return str(caught.value)


def fits(text, pattern):
    """Whether `text` is `pattern`, of which what ... stands for is left open."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("..."))), text)


@pytest.mark.parametrize("kind", DTYPES)
def test_every_dtype_and_shape_there_and_back(tmp_path, kind):
    arrays = {str(shape): noise(shape, DTYPES[kind], len(shape)) for shape in SHAPES}
    stored = written(tmp_path / "a", arrays)
    assert list(stored) == list(arrays)
    for name, array in arrays.items():
        assert stored[name].nbytes == array.nbytes
        assert_same(stored[name].read(), array)
    raw = (tmp_path / "a").read_bytes()
    assert re.findall(rb'"dtype":"(.*?)"', raw)[:5] == [kind.encode()] * 5


def test_rows_are_read_alone(tmp_path):
    arrays = {"first": noise((5,), np.float64), "a": noise((6, 3, 2), ml_dtypes.bfloat16)}
    stored = written(tmp_path / "a", arrays | {"n": np.int8(1), "none": noise((0, 3), np.int8)})
    assert stored["none"].read(slice(0, 1)).shape == (0, 3)
    with pytest.raises(ValueError, match=r"rows of n: got .* it has no dims"):
        stored["n"].read(slice(0, 1))
    for low, high in ((None, None), (0, 2), (2, 6), (5, 6), (3, 3), (4, 2), (-2, None), (4, 99)):
        for name, array in arrays.items():
            assert_same(stored[name].read(slice(low, high)), array[low:high])
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-13])  # n and the last row are gone
    assert_same(stored["a"].read(slice(0, 5)), arrays["a"][:5])
    size = (tmp_path / "a").stat().st_size
    text = f"{tmp_path}/a is cut short: {size} bytes, a needs {size + 12}"
    assert refused(stored["a"].read) == refused(stored["a"].read, slice(5, 6)) == text
    with pytest.raises(ValueError, match=r"rows of a: got .* the step must be 1"):
        stored["a"].read(slice(None, None, -1))
    (tmp_path / "a").unlink()
    assert refused(stored["a"].read) == f"cannot read {tmp_path}/a: No such file or directory"


def test_a_read_may_give_less_than_asked_for(tmp_path, monkeypatch):
    """Linux gives at most 2 GiB at a time."""
    array, asked = noise((100,), np.uint16), []
    stored = written(tmp_path / "a", {"a": array})

    class Little(io.FileIO):
        def readinto(self, view):
            asked.append(len(view))
            return super().readinto(view[:90])

    monkeypatch.setattr(safetensors, "open", lambda *_, buffering: Little(*_), raising=False)
    assert_same(stored["a"].read(), array)
    assert asked == [200, 110, 20]


def test_a_file_is_written_as_its_format_asks(tmp_path):
    """Against a file put together by hand, as the `safetensors` package writes it."""
    pair = np.array([[1.0], [-2.0]], ml_dtypes.bfloat16)
    arrays = {"né": np.uint8([1, 2, 3]), "b": pair, "a": np.flip(pair), "c": np.float32(3.0)}
    asked = []
    values = lambda name: asked.append(name) or arrays[name]
    write(tmp_path / "x", shapes(arrays), values, {"format": "pt"})
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"c":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"b":{"dtype":"BF16","shape":[2,1],"data_offsets":[4,8]},'
        b'"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]},'
        b'"n\xc3\xa9":{"dtype":"U8","shape":[3],"data_offsets":[12,15]}}'
    ).ljust(256)
    data = b"\0\0\x40\x40\x80\x3f\0\xc0\0\xc0\x80\x3f\1\2\3"
    assert (tmp_path / "x").read_bytes() == b"\0\1\0\0\0\0\0\0" + header + data
    assert asked == ["c", "b", "a", "né"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    for name, tensor in read_header(tmp_path / "x").items():
        assert_same(tensor.read(), arrays[name])
    assert written(tmp_path / "none", {}) == {}
    assert (tmp_path / "none").read_bytes() == b"\x08" + b"\0" * 7 + b"{}      "


def test_nothing_is_written_when_writing_fails(tmp_path):
    array = noise((4,), np.float32)
    promised = {"a": Shape(array.dtype, (4,)), "b": Shape(array.dtype, (4,))}
    for other, got in ((array[:3], r"float32\[3\]"), (array.view(np.int32), r"int32\[4\]")):
        values = {"a": array, "b": other}
        with pytest.raises(ValueError, match=rf"tensor b: got {got}, promised float32\[4\]"):
            write(tmp_path / "x", promised, values.__getitem__)
    text = refused(write, tmp_path / "x", {"a": Shape(np.dtype(np.complex64), (4,))}, lambda _: 0)
    assert text.startswith("tensor a: cannot write complex64; legal are bool, uint8, ")
    with pytest.raises(ValueError, match="no tensor may be called __metadata__"):
        write(tmp_path / "x", {"__metadata__": promised["a"]}, lambda _: array)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for function in (write, write_folder):
        text = refused(function, tmp_path / "file" / "x", promised, lambda _: array)
        assert text == f"cannot write {tmp_path}/file/x: Not a directory"


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    size = 1 << 20
    promised = {str(i): Shape(np.dtype(np.uint8), (size,)) for i in range(8)}
    with takes_at_most(1.2 * size):
        write_folder(tmp_path, promised, lambda name: np.full(size, int(name), np.uint8), 3 * size)
        for name, tensor in open_folder(tmp_path).items():
            assert np.bincount(tensor.read()[:: size - 1]).tolist() == [0] * int(name) + [2]


def test_a_folder_of_many_files(tmp_path):
    nbytes = {"d": 12, "a": 16, "e": 2, "c": 80, "b": 4, "f": 26}
    arrays = {name: noise((n,), np.uint8, n) for name, n in nbytes.items()}
    folder = tmp_path / "new" / "folder"
    write_folder(folder, shapes(arrays), arrays.__getitem__, 30)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    held = [["d", "a", "e"], ["c"], ["b", "f"]]
    assert sorted(path.name for path in folder.iterdir()) == [*files, INDEX]
    assert [list(read_header(folder / file)) for file in files] == held
    where = {name: file for file, names in zip(files, held) for name in names}
    index = json.loads((folder / INDEX).read_text())
    assert index == {"metadata": {"total_size": 140}, "weight_map": where}
    assert (folder / files[2]).read_bytes()[8:].startswith(b'{"__metadata__":{"format":"pt"},')
    for name, tensor in open_folder(folder).items():
        assert_same(tensor.read(), arrays.pop(name))
    assert not arrays


def test_a_folder_of_one_file(tmp_path):
    """Where there is one it is read, whatever an index says, as `transformers` does."""
    arrays = {name: noise((70,), np.uint8) for name in "ab"}
    write_folder(tmp_path / "c", shapes(arrays), arrays.__getitem__, 140)
    (tmp_path / "c" / INDEX).write_text("not read")
    assert {t.path.name for t in open_folder(tmp_path / "c").values()} == {"model.safetensors"}
    text = refused(write_folder, tmp_path / "c", shapes(arrays), arrays.__getitem__)
    assert fits(text, f"... holds weights already: model.safetensors, {INDEX}; give an empty ...")


def header_of(places):
    """Tensors of bytes, each from the one place to the other."""
    entries = [GOOD | {"dtype": "U8", "shape": [p[1] - p[0]], "data_offsets": p} for p in places]
    return {str(i): entry for i, entry in enumerate(entries)}


# Header and the line. Of dictionaries the data begin at byte 200 of the file; they are 8 bytes.
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DEEP = 200_000
HEADERS = [
    (b"[1, 2]", "JSON must begin with '{', got b'[1, 2]'"),
    (b' {"a": 1}', "JSON must begin with '{', got b' {\"a\": 1'"),
    (b"", "JSON must begin with '{', got b''"),
    (b'{"a": ', "not JSON: Expecting value: line 1 column 7 (char 6)"),
    (b"{} {}", "not JSON: Extra data: line 1 column 4 (char 3)"),
    (b'{"\xff": 1}', "not JSON: 'utf-8' codec can't decode byte 0xff in position 2: ..."),
    (b'{"a": {}, "b": {}, "a": {}}', "not JSON: 'a' is there twice"),
    (b'{"a": {"shape": [2], "dtype": "F32", "shape": [4]}}', "not JSON: 'shape' is there twice"),
    (
        b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "JSON nested too deeply; tensors need three levels",
    ),
    (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", "tensor 'a' is [[...]]; it must be dtype, ..."),
    (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit (4300 digits) ..."),
    (b'{"\\ud800": 5}', "tensor '\\ud800' is 5; ..."),
    ({"__metadata__": {"format": 1}}, "__metadata__ is {'format': 1}; it must map text to text"),
    ({"__metadata__": None}, "__metadata__ is None; it must map text to text"),
    ({"a": 5}, "tensor 'a' is 5; it must be dtype, shape and data_offsets"),
    ({"a\nb": 5}, "tensor 'a\\nb' is 5; ..."),
    ({"a" * 150: 5}, "tensor 'aaa...aaa' is 5; ..."),
    ({"a": {"dtype": "F32", "shape": [2]}}, "tensor 'a' is {...}; it must be dtype, ..."),
    ({"a": GOOD | {"strides": [1]}}, "tensor 'a' is {...}; it must be dtype, ..."),
    ({"a": GOOD, "b": GOOD}, "tensor 'b' begins at byte 200, the one before ends at 208; no ..."),
    ({}, "... is too long: it holds 208 bytes, its header promises 200"),
]
# What is changed in `GOOD`.
FIELDS = [
    ({"dtype": "C64"}, "dtype 'C64'; known are BOOL, U8, U16, ... BF16, F16, F32, F64"),
    ({"dtype": ["F32"]}, "dtype ['F32']; known are ..."),
    ({"shape": 2}, "shape 2; it must be a list of at most 64 integers from 0 to 2^63 - 1"),
    ({"shape": [-2, -1]}, "shape [-2, -1]; it must ..."),
    ({"shape": [True, 2]}, "shape [True, 2]; it must ..."),
    ({"shape": [2.0]}, "shape [2.0]; it must ..."),
    ({"shape": [float("nan")]}, "shape [nan]; it must ..."),
    ({"shape": ["2"]}, "shape ['2']; it must ..."),
    ({"shape": [2**63]}, "shape [9223372036854775808]; it must ..."),
    ({"shape": [1] * 64 + [2]}, "shape [1, 1, 1, 1, 1, 1, 1, 1, ...]; it must ..."),
    ({"shape": [2**60]}, "shape [1152921504606846976] of F32 takes 4,611,686,018,427,387,904 ..."),
    ({"shape": [2**32, 2**32]}, "shape [4294967296, ...] of F32 is more than 2^63 - 1 bytes"),
    ({"shape": [2**62 + 1, 2]}, "shape [..., 2] of F32 is more than 2^63 - 1 bytes"),  # mod 2^64: 8
    ({"shape": [2**62, 0], "data_offsets": [0, 0]}, "shape [..., 0] of F32 is more than 2^63 ..."),
    ({"data_offsets": [0, 4]}, "shape [2] of F32 takes 8 bytes, data_offsets [0, 4] hold 4"),
    ({"data_offsets": 8}, "data_offsets 8; they must be two integers, begin and end, 0 <= ..."),
    ({"data_offsets": [8]}, "data_offsets [8]; they ..."),
    ({"data_offsets": [0, 8, 8]}, "data_offsets [0, 8, 8]; they ..."),
    ({"data_offsets": [8, 0]}, "data_offsets [8, 0]; they ..."),
    ({"data_offsets": [-8, 0]}, "data_offsets [-8, 0]; they ..."),
    ({"data_offsets": [False, 8]}, "data_offsets [False, 8]; they ..."),
    ({"data_offsets": [2**64 - 8, 2**64]}, "data_offsets [18446744073709551608, 184..."),
]
HEADERS += [({"a": GOOD | changed}, f"tensor 'a': {line}") for changed, line in FIELDS]
PLACES = [
    ([(0, 2**62)], "... is cut short: it holds 208 bytes, its header promises 4,611,686,018,42..."),
    ([(0, 8), (8, 16)], "... is cut short: it holds 208 bytes, its header promises 216"),
    ([(0, 3), (3, 7)], "... is too long: it holds 208 bytes, its header promises 207"),
    ([(0, 5), (4, 8)], "tensor '1' begins at byte 204, the one before ends at 205; no gaps ..."),
    ([(5, 8), (0, 4)], "tensor '0' begins at byte 205, the one before ends at 204; no gaps ..."),
    ([(1, 8)], "tensor '0' begins at byte 201, the one before ends at 200; no gaps and no ..."),
    ([(0, 8), (4, 4)], "tensor '1' begins at byte 204, the one before ends at 208; ..."),
    ([(0, 8), (9, 9)], "tensor '1' begins at byte 209, the one before ends at 208; ..."),
]
HEADERS += [(header_of(places), line) for places, line in PLACES]


def file_of(path, header):
    if not isinstance(header, bytes):
        header = json.dumps(header).encode().ljust(192)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12345678")
    return path


@pytest.mark.parametrize("case", range(len(HEADERS)))
def test_a_bad_header_is_one_line_and_no_memory(tmp_path, case):
    header, line = HEADERS[case]
    path = file_of(tmp_path / "x", header)
    # Python's own objects; the data would be more than there is in the world.
    with takes_at_most(100_000 + 20 * path.stat().st_size):
        text = refused(read_header, path)
    assert fits(text, f"{path}: {line}" if not line.startswith("... is") else line), text
    assert str(path) in text


@pytest.mark.parametrize(
    "header",
    [
        {"a": GOOD},
        {"a": GOOD, "__metadata__": {}},
        {"a": GOOD | {"shape": [1] * 63 + [2]}},
        {"a": GOOD, "b": GOOD | {"shape": [2**60, 0], "data_offsets": [0, 0]}},
        header_of([(5, 8), (0, 5), (5, 5), (8, 8)]),
        b'{"a": {"shape": [2], "data_offsets": [0, 8], "dtype": "F32"}}  \n',
    ],
)
def test_a_good_header(tmp_path, header):
    """What is legal where the tables above change nothing."""
    stored = read_header(file_of(tmp_path / "x", header))
    assert "__metadata__" not in stored
    in_order = sorted(stored.values(), key=lambda tensor: tensor.start)
    assert b"".join(tensor.read().tobytes() for tensor in in_order) == b"12345678"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "... must begin with a header's length in 8 bytes, ...: got 0 bytes in all"),
        (b"\2\0\0\0\0\0\0", "... is no safetensors file, ...: got 7 bytes in all"),
        (b"\0\0\0\0\0\0\0\x80{}", "...: got a header of 9,223,372,036,854,775,808 bytes"),
        (b"\xff" * 8 + b"{}", "...: got a header of 18,446,744,073,709,551,615 bytes"),
        ((10**8 + 1).to_bytes(8, "little"), "..., at most 100,000,000: got ... 100,000,001 bytes"),
        ((10**8).to_bytes(8, "little"), "... holds 8 bytes, its header is to end at 100,000,008"),
        (b"\3\0\0\0\0\0\0\0{}", "... is cut short: it holds 10 bytes, ... end at 11"),
        (b"version https://git-lfs.github.com/spec/v1\n", "...: git lfs pull"),
        (b"PK\3\4\0\0\x08\x08archive/data.pkl", "... is no safetensors file, ..."),
        (None, "cannot read ...: No such file or directory"),
    ],
)
def test_a_bad_length_is_not_read(tmp_path, content, line):
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with takes_at_most(100_000):
        text = refused(read_header, tmp_path / "x")
    assert f"{tmp_path}/x" in text and fits(text, line), text


def test_every_cut_of_a_file_is_seen(tmp_path):
    written(tmp_path / "x", {"a": noise((3,), np.float32), "b": noise((2,), np.int8)})
    whole = (tmp_path / "x").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:size])
        assert f" {size} bytes" in refused(read_header, tmp_path / "x")


# Index (its weight_map, or its text) of a.st, which holds a and both, and b.st: b and both.
MANY = [f"{name}.st" for name in "a012345"]
INDEXES = [
    ("{", f"...{INDEX}: not JSON: Expecting ..."),
    ("[]", f"...{INDEX}: JSON must begin with '{{', got b'[]'"),
    ('{"a":' * DEEP, f"...{INDEX}: JSON nested too deeply; ..."),
    ("{}", f"...{INDEX}: weight_map is None; it must name a file per tensor"),
    ({}, f"...{INDEX}: weight_map is {{}}; it must name a file per tensor"),
    ({"a": 1}, f"...{INDEX}: weight_map is {{'a': 1}}; it must name a file per tensor"),
    ('{"weight_map": {"a": "a.st", "a": "b.st"}}', "... not JSON: 'a' is there twice"),
    ({"a": "../a.st"}, "... names '../a.st'; only files in its own folder are read"),
    ({"a": "/etc/passwd"}, "... names '/etc/passwd'; only files ..."),
    ({"a": "..\\a.st"}, "... names '..\\\\a.st'; only files ..."),
    ({"a": ".."}, "... names '..'; only files ..."),
    ({"a": "a\nb"}, "... names 'a\\nb'; only files ..."),
    ({"a": "a\0b"}, "... names 'a\\x00b'; only files ..."),
    ({"a": "\ud800"}, "... names '\\ud800'; only files ..."),
    ({"a": "a" * 300}, "cannot read ...: File name too long"),
    (dict(zip("a012345", MANY)), f"...: missing files, which {INDEX} names: 0.st, ... and 2 more"),
    ({"a": "a.st", "b": "b.st", "both": "a.st"}, f"... {INDEX} says: b.st also holds 'both'"),
    ({"both": "b.st", "c": "a.st"}, "... says: a.st also holds 'a', b.st ..., a.st lacks 'c'"),
]


@pytest.mark.parametrize("case", range(len(INDEXES)))
def test_a_bad_index_is_one_line(tmp_path, case):
    index, line = INDEXES[case]
    for file in ("a", "b"):
        written(tmp_path / f"{file}.st", dict.fromkeys([file, "both"], np.ones(2)))
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (tmp_path / INDEX).write_text(text)
    text = refused(open_folder, tmp_path)
    assert str(tmp_path) in text and fits(text, line), text


def test_a_bad_file_of_many_is_named(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "a.st"}}')
    (tmp_path / "a.st").write_bytes(b"123")
    assert refused(open_folder, tmp_path).startswith(f"{tmp_path}/a.st is no safetensors file")
    with open(tmp_path / INDEX, "wb") as file:
        file.truncate(100_000_001)  # a hole: takes no room on disk
    with takes_at_most(100_000):
        text = refused(open_folder, tmp_path)
    assert text == f"{tmp_path}/{INDEX}: 100,000,001 bytes; legal are 100,000,000"


def test_a_folder_without_weights(tmp_path):
    neither = f"{tmp_path} holds neither model.safetensors nor {INDEX}"
    (tmp_path / "model.safetensors").mkdir()
    assert refused(open_folder, tmp_path) == f"{neither}; it holds: nothing"
    (tmp_path / "config.json").touch()
    assert refused(open_folder, tmp_path) == f"{neither}; it holds: config.json"
    for name in ("x.pth", "pytorch_model.bin"):
        (tmp_path / name).touch()
        text = refused(open_folder, tmp_path)
        assert fits(text, f"{neither}, but {name}...: pickled weights are not read; ..."), text
        assert "save_pretrained(..., safe_serialization=True)" in text
    (tmp_path / "adapter.safetensors").touch()
    assert refused(open_folder, tmp_path) == f"{neither}; it holds: adapter.safetensors"
    assert refused(open_folder, tmp_path / "no").endswith("no: No such file or directory")
    assert refused(open_folder, tmp_path / "x.pth").endswith("x.pth: Not a directory")
