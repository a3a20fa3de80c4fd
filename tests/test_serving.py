"""Exported programs give the logits of evaluation, in a process with only jax or TensorFlow, and in onnxruntime."""

import contextlib
import dataclasses
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from support.cases import rare_case
from support.data import write_pictures
from support.images import encode
from support.pages import page_block
from support.runs import LEAN, fails, train_words

from benchmarks.programs import tpu_plugin
from jaxddp.cli import main
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.data.batch import PixelFormat
from jaxddp.data.opening import open_splits
from jaxddp.data.order import EvalOrder
from jaxddp.data.stream.decode import Pixels
from jaxddp.inference import exports
from jaxddp.inference.exports import export_program, logits_of
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import Topology

pytestmark = pytest.mark.slow
FORMATS = ("stablehlo", "onnx", "savedmodel", "tflite")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 40, 30, 48)


@pytest.fixture(scope="module")
def workdir(pictures, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "first"
    images = ["--data.resize", "20", "--data.interpolation", "bicubic", "--data.eval-crop", "squash"]
    assert main(train_words(pictures, folder, *LEAN, *images, "--train.duration", "10 steps")) == 0
    return folder


@pytest.fixture(scope="module")
def files(workdir, tmp_path_factory) -> dict[str, Path]:
    out = {file_format: tmp_path_factory.mktemp("out") / f"net.{file_format}" for file_format in FORMATS}
    for file in out.values():
        assert main(["export", str(workdir), "--out", str(file)]) == 0
    return out


@pytest.fixture(scope="module")
def run(workdir) -> TrainedRun:
    return restore_run(workdir, "best", Topology.create(1))


@pytest.fixture(scope="module")
def val(run):
    """Return the validation images, cropped as for evaluation, with their labels."""
    source = open_splits(run.config.data)["val"]
    batch = next(iter(source.eval_batches(EvalOrder(len(source), len(source)), run.config.data)))
    return batch.image, batch.label


@pytest.fixture(scope="module")
def evaluated(workdir) -> str:
    """Return the top-1 of `jaxddp eval`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["eval", str(workdir / "config.json"), "--workdir", str(workdir), "--step", "best"]) == 0
    return next(line for line in output.getvalue().splitlines() if line.startswith("top1"))


WITHOUT_JAXDDP = """
import sys
import numpy as np
program, images, out = sys.argv[1:]
form = program.rpartition(".")[2]
for name in ("jaxddp", "flax", "optax", "orbax", "tensorflow" if form == "stablehlo" else "jax"):
    sys.modules[name] = None
if form == "stablehlo":
    import jax
    call = jax.export.deserialize(bytearray(open(program, "rb").read())).call
elif form == "onnx":
    import onnxruntime
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    call = lambda batch: session.run(["logits"], {"images": batch})[0]
else:
    import tensorflow as tf
    is_lite = form == "tflite"
    loaded = tf.lite.Interpreter(program) if is_lite else tf.saved_model.load(program)
    signature = loaded.get_signature_runner() if is_lite else loaded.signatures["serving_default"]
    call = lambda batch: signature(images=batch if is_lite else tf.constant(batch))["logits"]
images = np.load(images)
np.savez(out, all=call(images), one=call(images[:1]))
"""


def logits_from(file: Path, images: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of all images at once, and of the first image alone."""
    np.save(folder / "images.npy", images)
    words = ["-c", WITHOUT_JAXDDP, file, folder / "images.npy", folder / "out.npz"]
    subprocess.run([sys.executable, *words], check=True, timeout=200)
    return tuple(np.load(folder / "out.npz").values())


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_exported_program_gives_the_logits_of_evaluation(file_format, files, run, val, evaluated, tmp_path):
    images, labels = val
    expected = np.asarray(jax.jit(logits_of(run))(images))
    actual, first = logits_from(files[file_format], images, tmp_path)
    assert np.abs(actual - expected).max() < 1e-5 and np.abs(first - expected[:1]).max() < 1e-5
    assert f"top1: {np.mean(actual.argmax(1) == labels):.7g}" == evaluated
    newer_and_older = (files["stablehlo"], files["savedmodel"] / "saved_model.pb")
    assert len({program.read_bytes().partition(b"StableHLO_v")[2][:6] for program in newer_and_older}) == 2


@pytest.mark.parametrize("precision", ["int8", rare_case("float16")])
@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_a_narrow_program_tells_its_accuracy(file_format, precision, workdir, run, val, evaluated, tmp_path, capfd):
    (images, labels), out = val, tmp_path / f"net.{file_format}"
    assert main(["export", str(workdir), "--out", str(out), "--precision", precision]) == 0
    actual, first = logits_from(out, images, tmp_path)
    expected, about = np.asarray(jax.jit(logits_of(run))(images)), json.loads(Path(f"{out}.json").read_text())
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    least, most = (1e-5, 1e-3) if precision == "float16" else (1e-3, 0.1)
    assert least < error < most and np.abs(first - actual[:1]).max() < 1e-4
    before, after = about[precision]["network"], about[precision]["program"]
    assert (f"top1: {before:.7g}", after) == (evaluated, np.mean(actual.argmax(1) == labels))
    assert f"; top-1 {before:.2%} -> {after:.2%} on 30 validation images; classes" in capfd.readouterr().out


def test_a_precision_that_cannot_be_exported_is_an_error(run, workdir, tmp_path, monkeypatch, capfd):
    words = ["export", str(workdir), "--out", str(tmp_path / "net.stablehlo"), "--precision", "int8"]
    assert fails(words, capfd) == "jaxddp: --precision int8: needs --format onnx or tflite; leave it out"
    other = dataclasses.replace(run, signature=dataclasses.replace(run.signature, class_ids=tuple("abcdz")))
    for name, fault in (("a.savedmodel", "'int8': expected 'float32'"), ("a.onnx", "has other classes than the data")):
        with pytest.raises(InputError, match=fault):
            export_program(other, tmp_path / name, precision="int8")
    moved = [*words[:3], f"{tmp_path}/a.onnx", "--data", "x", "--precision", "float16"]
    assert "--data x: is read for --precision and --average only; leave it out" in fails(moved[:-2], capfd)
    assert "/x: no such directory or file; check --data" in fails(moved, capfd)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert fails([*words[:3], f"{tmp_path}/a.tflite"], capfd).endswith("install 'jaxddp[tensorflow]'")


def test_the_shapes_in_an_onnx_program_are_those_that_its_runtime_infers(capfd):
    """jax2onnx gives the results of ReLU6 after a batch norm the shape NHWC, and each view a copy of the kernels."""
    norm = nn.BatchNorm(use_running_average=True)
    layers = [nn.Conv(2, (3, 3)), norm, nn.relu6, nn.Conv(4, (3, 3)), lambda x: x.mean((1, 2))]
    network, pixels = nn.Sequential(layers), np.random.default_rng(0).random((2, 8, 6, 3), np.float32)
    variables = jax.device_get(network.init(jax.random.key(0), pixels))
    views = lambda images: network.apply(variables, images) + network.apply(variables, images[:, :, ::-1])  # noqa: E731
    content = exports.convert(views, jax.ShapeDtypeStruct(("B", 8, 6, 3), jnp.float32))
    onnx.checker.check_model(model := onnx.load_from_string(content), full_check=True)
    assert sum(len(array.dims) == 4 for array in model.graph.initializer) == 2
    capfd.readouterr()
    logits = exports.session(content)(pixels)
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(logits, views(pixels), rtol=1e-5)


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_inputs_of_a_program_are_described_beside_it(file_format, files, run):
    about = json.loads(Path(f"{files[file_format]}.json").read_text())
    assert about["input"] == {"name": "images", "dtype": "uint8", "shape": ["B", 16, 16, 3]}
    assert about["output"] == {"name": "logits", "dtype": "float32", "shape": ["B", 5]}
    assert (about["format"], about["short_side"], about["step"]) == (file_format, 20, run.step)
    assert (about["interpolation"], about["crop"], about["labels"]) == ("bicubic", "squash", "one label")
    assert about["class_names"] == list("abcde") == about["class_ids"]


def test_a_stablehlo_program_runs_on_every_platform(files):
    exported = jax.export.deserialize(bytearray(files["stablehlo"].read_bytes()))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert [str(aval) for aval in exported.in_avals] == ["uint8[b,16,16,3]"]


@pytest.mark.skipif(not tpu_plugin.is_present(), reason="python benchmarks/programs/tpu_plugin.py was not run")
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_a_stablehlo_program_compiles_for_a_tpu(files):
    exported = jax.export.deserialize(bytearray(files["stablehlo"].read_bytes()))
    chip = jax.sharding.SingleDeviceSharding(tpu_plugin.described_devices("v5e:2x2")[0])
    images = jax.ShapeDtypeStruct((8, 16, 16, 3), np.uint8, sharding=chip)
    compiled = jax.jit(exported.call).lower(images).compile()
    assert compiled.memory_analysis().output_size_in_bytes >= 8 * 5 * 4


def test_a_program_with_other_logits_is_not_written_or_its_loss_is_told(run, val, tmp_path, monkeypatch):
    session = exports.session
    monkeypatch.setattr(exports, "session", lambda *arguments: lambda pixels: -session(*arguments)(pixels))
    with pytest.raises(JaxddpError, match=r"net\.onnx: not written: the program's logits differ from the network's by"):
        export_program(run, tmp_path / "net.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []
    told = export_program(run, tmp_path / "net.onnx", precision="float16")
    logits, labels = np.asarray(jax.jit(logits_of(run))(val[0])), val[1]
    before, after = (np.mean(each.argmax(1) == labels) for each in (logits, -logits))
    assert f"top-1 {before:.2%} -> {after:.2%} on " in told and before != after


@pytest.mark.ci
def test_the_server_of_the_docs_resizes_alpha_as_evaluation_does_and_knows_several_labels(files, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["server.py", str(files["stablehlo"]), "0"])
    server = page_block("docs/serving.md", "ThreadingHTTPServer").partition("\nlogits_of(np")[0]
    server = server.replace('["shape"]', '["shape"][:3] + [4]').replace('about["labels"]', '"several labels"')
    exec(server, space := {})
    image = encode(np.random.default_rng(0).integers(0, 256, (30, 48, 4), np.uint8), "PNG")
    expected = Pixels(16, PixelFormat(4), "bicubic", resize=20, squash=True)(image)
    assert np.abs(space["pixels_of"](image)[0] - expected.astype(int)).max() <= 1
    assert space["probabilities_of"] is jax.nn.sigmoid


@pytest.mark.ci
def test_the_server_of_the_docs_classifies_images_and_rejects_invalid_requests(files, run, pictures, tmp_path):
    (tmp_path / "server.py").write_text(page_block("docs/serving.md", "ThreadingHTTPServer"))
    words = [sys.executable, "server.py", str(files["stablehlo"]), "0"]
    server = subprocess.Popen(words, cwd=tmp_path, stdout=-1, stderr=-1, text=True)
    (killer := threading.Timer(120, server.kill)).start()
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split()[-1]
        images = sorted((pictures / "val").rglob("*.png"))[:6]
        expected = run.predict(images)
        for image, name, shares in zip(images, expected.classes, expected.probabilities, strict=True):
            status, answer = post(port, image.read_bytes())
            assert status == 200 and len(answer["classes"]) == 5
            # Pillow's and TensorFlow's resized pixels differ by a level of 255 at most.
            assert answer["classes"][0]["probability"] == pytest.approx(shares.max(), abs=0.02)
            assert answer["classes"][0]["class"] == name or np.sort(shares)[-1] - np.sort(shares)[-2] < 0.02
        assert [post(port, body)[0] for body in (b"no image", b"")] == [400, 411]
        for header, status in {
            "Content-Length: 5": 400,
            f"Content-Length: {'9' * 5000}": 413,
            "Content-Length: -5": 411,
            "Transfer-Encoding: chunked": 411,
        }.items():
            with socket.create_connection(("127.0.0.1", int(port)), 30) as client:
                client.sendall(f"POST / HTTP/1.1\r\n{header}\r\n\r\nimage".encode())
                assert client.makefile("rb").readline().split()[1] == b"%d" % status, header
        # A client that does not wait for the response is not reported.
        socket.create_connection(("127.0.0.1", int(port)), 30).close()
        assert post(port, encode(np.zeros((60_000, 1), np.uint8), "PNG"))[0] == 200
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate()
        killer.cancel()
    assert "Traceback" not in errors


def post(port: str, data: bytes) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
