"""Exported programs give the logits of evaluation, in a process with only jax, and in onnxruntime."""

import contextlib
import functools
import io
import json
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
import onnxruntime
import pytest
from PIL import Image
from support.data import random_table, write_arrays, write_pictures
from support.pages import page_block
from support.runs import LEAN, train_words

from benchmarks.programs import tpu_plugin
from jaxddp.cli import main
from jaxddp.core.errors import JaxddpError
from jaxddp.data.opening import open_splits
from jaxddp.data.order import EvalOrder
from jaxddp.inference import exports
from jaxddp.inference.exports import export_program, logits_of
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import Topology

pytestmark = pytest.mark.slow


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
    out = {file_format: tmp_path_factory.mktemp("out") / f"net.{file_format}" for file_format in ("stablehlo", "onnx")}
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


ONLY_JAX = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jaxddp", "flax", "optax", "orbax", "tensorflow"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import jax, numpy as np
program, images, out = sys.argv[1:]
call = jax.export.deserialize(bytearray(open(program, "rb").read())).call
images = np.load(images)
np.savez(out, all=call(images), one=call(images[:1]))
"""


def logits_from(file_format: str, file: Path, images: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of all images at once, and of the first image alone."""
    if file_format == "onnx":
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        return tuple(session.run(["logits"], {"images": batch})[0] for batch in (images, images[:1]))
    np.save(folder / "images.npy", images)
    words = [str(file), str(folder / "images.npy"), str(folder / "out.npz")]
    subprocess.run([sys.executable, "-c", ONLY_JAX, *words], check=True, timeout=200)
    results = np.load(folder / "out.npz")
    return results["all"], results["one"]


@pytest.mark.parametrize("file_format", ["stablehlo", "onnx"])
def test_an_exported_program_gives_the_logits_of_evaluation(file_format, files, run, val, evaluated, tmp_path):
    images, labels = val
    expected = np.asarray(jax.jit(logits_of(run))(images))
    actual, first = logits_from(file_format, files[file_format], images, tmp_path)
    print(f"{file_format}: largest difference of logits {np.abs(actual - expected).max():.1e}")
    assert np.abs(actual - expected).max() < 1e-4 and np.abs(first - expected[:1]).max() < 1e-4
    assert f"top1: {np.mean(actual.argmax(1) == labels):.7g}" == evaluated


def test_the_shapes_in_an_onnx_program_are_those_that_its_runtime_infers(capfd):
    """jax2onnx gives the results of ReLU6 after a batch norm the shape NHWC, and computes them in NCHW."""
    norm = nn.BatchNorm(use_running_average=True)
    layers = [nn.Conv(2, (3, 3)), norm, nn.relu6, nn.Conv(4, (3, 3)), lambda x: x.mean((1, 2))]
    network, pixels = nn.Sequential(layers), np.random.default_rng(0).random((2, 8, 6, 3), np.float32)
    variables = jax.device_get(network.init(jax.random.key(0), pixels))
    images = jax.ShapeDtypeStruct(("B", 8, 6, 3), jnp.float32)
    content = exports.convert(functools.partial(network.apply, variables), images)
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
    capfd.readouterr()
    logits = exports.session(content)(pixels)
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(logits, network.apply(variables, pixels), rtol=1e-5)


@pytest.mark.parametrize("file_format", ["stablehlo", "onnx"])
def test_the_inputs_of_a_program_are_described_beside_it(file_format, files, run):
    about = json.loads(Path(f"{files[file_format]}.json").read_text())
    assert about["input"] == {"name": "images", "dtype": "uint8", "shape": ["B", 16, 16, 3]}
    assert about["output"] == {"name": "logits", "dtype": "float32", "shape": ["B", 5]}
    assert (about["format"], about["short_side"], about["step"]) == (file_format, 20, run.step)
    assert (about["interpolation"], about["crop"]) == ("bicubic", "squash")
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


def test_a_program_with_different_logits_is_not_written(run, tmp_path, monkeypatch):
    session = exports.session
    monkeypatch.setattr(exports, "session", lambda *arguments: lambda pixels: session(*arguments)(pixels) + 0.1)
    with pytest.raises(JaxddpError, match=r"net\.onnx: not written: the program's logits differ from the network's by"):
        export_program(run, tmp_path / "net.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_arrays_is_exported_at_their_image_size(tmp_path):
    data = write_arrays(tmp_path / "images.npz", random_table(16, image=16), random_table(8, seed=1, image=16))
    assert main(train_words(data, tmp_path / "run", *LEAN, "--train.duration", "1 step")) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "net.stablehlo")]) == 0
    assert json.loads((tmp_path / "net.stablehlo.json").read_text())["short_side"] == 16


@pytest.mark.ci
def test_the_server_of_the_docs_classifies_images_and_rejects_invalid_requests(files, run, pictures, tmp_path):
    (tmp_path / "server.py").write_text(page_block("docs/serving.md", "ThreadingHTTPServer"))
    server = subprocess.Popen(
        [sys.executable, "server.py", str(files["stablehlo"]), "0"], cwd=tmp_path, stdout=-1, stderr=-1, text=True
    )
    killer = threading.Timer(120, server.kill)
    killer.start()
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
        assert post(port, b"no image")[0] == 400
        assert post(port, b"")[0] == 411
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
        thin = io.BytesIO()
        Image.new("L", (1, 60_000)).save(thin, "PNG")
        assert post(port, thin.getvalue())[0] == 200
    finally:
        killer.cancel()
        server.kill()
        _, errors = server.communicate()
    assert "Traceback" not in errors


def post(port: str, data: bytes) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
