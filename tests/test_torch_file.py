""".pth files of PyTorch are read without PyTorch, and their pickles run no code."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.torch_files import torch_file

from jaxddp.core.errors import InputError
from jaxddp.weights.state_dict import read

GRID = np.arange(12, dtype=np.float32).reshape(3, 4)
EXPECTED = {
    **{"grid": GRID, "transposed": GRID.T, "part": np.arange(2, 6), "scalar": np.array(7)},
    **{"half": np.array([0.5, -2], np.float16), "brain": np.array([1.5, -2], ml_dtypes.bfloat16)},
    **{"flags": np.array([True, False]), "double": np.array([0.1]), "parameter": np.ones(2, np.float32)},
    **{"none": np.zeros((0, 3), np.float32), "bytes": np.array([255], np.uint8)},
}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def changed_zip(content: bytes, changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file with other contents of some entries, by their names without the folder."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for entry in old.infolist():
            name = entry.filename.partition("/")[2]
            new.writestr(entry.filename, changes.get(name, old.read(entry)))
    return out.getvalue()


@pytest.mark.parametrize("form", ["zip", "old"])
def test_both_formats_of_pytorch_give_its_arrays(tmp_path, form):
    actual = read(written(tmp_path / "w.pth", torch_file(form)))
    assert actual.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        np.testing.assert_array_equal(actual[name], expected, name, strict=True)


def test_the_averaged_state_dict_in_a_checkpoint_is_read_without_counters(tmp_path):
    actual = read(written(tmp_path / "w.pth.tar", torch_file("checkpoint")))
    assert sorted(actual) == ["0.bias", "0.weight", "1.bias", "1.running_mean", "1.running_var", "1.weight"]
    assert np.array_equal(actual["1.running_var"], [6, 6])


OTHER_OBJECTS = {
    "module": "contains torch.nn.modules.container.Sequential, which is not part of plain weights; save",
    "sparse": "contains torch._utils._rebuild_sparse_tensor, which is not part of plain weights; save",
    "number": "contains a int and no state dict of named tensors; save a state dict",
}


@pytest.mark.parametrize("form", OTHER_OBJECTS)
def test_other_objects_are_refused_in_one_line(tmp_path, form):
    with pytest.raises(InputError, match=f"w.pth: {OTHER_OBJECTS[form]}"):
        read(written(tmp_path / "w.pth", torch_file(form)))


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("end", [b"K\x01s.", b"K\x01u.", b"K\x01d.", b"\x90.", b"\x91.", b"\x85."])
def test_keys_that_take_for_ever_to_hash_are_refused(tmp_path, end):
    """The hash of the key, a tuple of twice the tuple before, takes 2**60 steps."""
    begin = {b"s": b"}", b"u": b"}(", b"d": b"(", b"\x85": b""}.get(end[-2:-1], b"\x8f(")
    key = b")q\0" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
    pickled = b"\x80\x02" + begin + key + end
    old = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}))
    content = old + pickled if end == b"\x85." else changed_zip(torch_file("zip"), {"data.pkl": pickled})
    with pytest.raises(InputError, match="w.pth: contains a (tuple as a key|set), which is not part of plain weights"):
        read(written(tmp_path / "w.pth", content))


@pytest.mark.parametrize("form", ["zip", "old"])
def test_a_pickle_runs_no_code(tmp_path, form):
    attack = pickle.dumps({"state_dict": Attack(tmp_path / "attacked")}, protocol=2)
    content = changed_zip(torch_file("zip"), {"data.pkl": attack}) if form == "zip" else attack
    with pytest.raises(InputError, match="w.pth: contains (posix|nt).mkdir, which is not part of plain weights"):
        read(written(tmp_path / "w.pth", content))
    assert not (tmp_path / "attacked").exists()
    pickle.loads(attack)  # The attack works.
    assert (tmp_path / "attacked").is_dir()


MEMO_BOMB = b"\x80\x02r\xff\xff\xff\x0f."  # Object 2**28 - 1, for which Python's unpickler allocates 4 GB.
with zipfile.ZipFile(io.BytesIO(torch_file("zip"))) as archive:
    PICKLE = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def expanded_grid(rows: bytes) -> bytes:
    """Return a file in which the first row of GRID is expanded: `GRID[:1].expand(rows, 4)`."""
    old, new = b"K\x03K\x04\x86q\x08K\x04K\x01", b"J" + rows + b"K\x04\x86q\x08K\x00K\x01"
    assert old in PICKLE
    return changed_zip(torch_file("zip"), {"data.pkl": PICKLE.replace(old, new)})


def test_an_expanded_tensor_repeats_the_elements_of_its_storage(tmp_path):
    actual = read(written(tmp_path / "w.pth", expanded_grid(b"\xc8\0\0\0")))["grid"]
    assert np.array_equal(actual, np.broadcast_to(GRID[:1], (200, 4)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed_zip(torch_file("zip"), {"data/0": bytes(24)}), "storage 0 has another size"),
        (
            changed_zip(torch_file("zip"), {"data/0": bytes(24), "data.pkl": PICKLE.replace(b"K\x0c", b"K\x06", 1)}),
            r"a tensor of shape \(3, 4\) in a storage of 6 elements",
        ),
        (changed_zip(torch_file("zip"), {}, zipfile.ZIP_DEFLATED), "data.pkl is compressed|byteorder is compressed"),
        (changed_zip(torch_file("zip"), {"byteorder": b"big"}), "its numbers are big-endian"),
        (b"", "EOFError"),
        (MEMO_BOMB, "list index out of range"),
        (expanded_grid(b"\x01\0\x04\0"), r"a tensor of shape \(262145, 4\) in a storage of 12 elements"),
        (pickle.dumps(3), "its first bytes are of another format"),
        (torch_file("zip")[:900], "not a zip file"),
    ],
    ids=["size", "part", "compressed", "byte order", "empty", "memo", "stride 0", "pickle", "cut"],
)
def test_damaged_files_raise_one_line(tmp_path, content, message):
    with pytest.raises(InputError, match=rf"w.pth: not a complete .pth file \(.*({message}).*\); download it again"):
        read(written(tmp_path / "w.pth", content))


@pytest.mark.ci
@pytest.mark.parametrize("form", ["zip", "old"])
def test_any_flipped_bit_and_any_cut_gives_arrays_or_one_line(tmp_path, form):
    content = torch_file(form)
    variants = [content[:size] for size in range(0, len(content), 89)]
    variants += [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :] for i in range(0, len(content), 41)]
    failed = 0
    for variant in variants:
        try:
            read(written(tmp_path / "w.pth", variant))
        except InputError as error:
            assert "\n" not in str(error)
            failed += 1
    assert failed > len(variants) // 4
