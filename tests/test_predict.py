"""`jaxddp predict` and `load_run`: the order of images, equal bytes on any number of devices, and rows with errors."""

import csv
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pyarrow.parquet
import pytest
from PIL import Image
from support.cases import essential_and_rare
from support.data import random_table, write_pictures
from support.networks import largest_difference, linear_model
from support.runs import LEAN, fails, train_words
from support.shared import sgd

import jaxddp
from jaxddp.cli import main
from jaxddp.config import Config, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.files import try_lock
from jaxddp.data.formats.ilsvrc import TEST_CSV
from jaxddp.data.opening import open_inputs, open_splits
from jaxddp.data.order import EvalOrder
from jaxddp.inference.exports import averaged
from jaxddp.inference.output_files import write_predictions
from jaxddp.inference.trained import BatchOutputs, Ensemble, TrainedRun, images_at_once, restore_run
from jaxddp.mesh import AXIS, Topology
from jaxddp.weights.places import SIGNATURE_FILE
from jaxddp.workdir.saved_state import recipe_of_run

COUNT = 150
FORMATS = ("csv", "jsonl", "parquet")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Return a folder of JPEG files by class. The tests predict its validation split."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), 20, COUNT, 24, "jpg")


@pytest.fixture(scope="module")
def workdir(pictures, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "first"
    options = ["--data.resize", "18", "--train.duration", "6 steps", "--eval.every", "6 steps"]
    assert main(train_words(pictures, folder, *LEAN, *options)) == 0
    return folder


@pytest.fixture(scope="module")
def run(workdir) -> TrainedRun:
    return restore_run(workdir, "best", Topology.create(1))


def write_to(out: Path, run: Any, table: Any, form: Any = "csv", **options) -> None:
    write_predictions(run, table, out, form, **options)


def predict_to_file(run: TrainedRun, images: list, out: Path, **options) -> bytes:
    write_to(out, run, open_inputs(images), **options)
    assert not out.with_name(f"{out.name}.partial").exists()
    return out.read_bytes()


def rows_of(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(content.decode().splitlines()))


@pytest.fixture(scope="module")
def val_predictions(run, pictures, tmp_path_factory) -> bytes:
    return predict_to_file(run, [pictures / "val"], tmp_path_factory.mktemp("out") / "whole.csv")


@pytest.mark.slow
def test_each_image_is_predicted_once_and_in_order(val_predictions, pictures):
    rows = rows_of(val_predictions)
    images = sorted(path.relative_to(pictures / "val").as_posix() for path in (pictures / "val").rglob("*.jpg"))
    assert [row["id"] for row in rows] == images and len(images) == COUNT
    suffixes = ("", "_2", "_3", "_4", "_5")
    probabilities = np.array([[float(row[f"probability{suffix}"]) for suffix in suffixes] for row in rows])
    assert np.allclose(probabilities.sum(1), 1, atol=1e-6) and (np.diff(probabilities) <= 0).all()
    assert {row["error"] for row in rows} == {""}


@pytest.mark.slow
def test_cells_that_a_spreadsheet_would_compute_are_escaped_on_request(run, pictures, tmp_path):
    image = next((pictures / "val").rglob("*.jpg"))
    (tmp_path / "odd").mkdir()
    for name in ("=1+1.jpg", "\td.jpg", "e.jpg"):
        shutil.copy(image, tmp_path / "odd" / name)
    plain, guarded = (
        rows_of(predict_to_file(run, [tmp_path / "odd"], tmp_path / f"{guard}.csv", guard_formulas=guard))
        for guard in (False, True)
    )
    assert [row["id"] for row in guarded] == [f"'{row['id']}" if row["id"] != "e.jpg" else "e.jpg" for row in plain]
    assert [row | {"id": ""} for row in guarded] == [row | {"id": ""} for row in plain]


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((3,), 2, 8))
def test_any_number_of_devices_writes_the_same_bytes(
    workdir, run, pictures, val_predictions, unusable_images, devices, tmp_path
):
    several = restore_run(workdir, "best", Topology.create(devices))
    assert predict_to_file(several, [pictures / "val"], tmp_path / "out.csv") == val_predictions
    errors = [predict_to_file(each, [unusable_images], tmp_path / "errors.csv") for each in (several, run)]
    assert errors[0] == errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [64, 128, 150])
def test_an_interrupted_prediction_continues(run, pictures, val_predictions, stop_after, tmp_path):
    def stop(done: int, errors: int) -> None:
        if done >= stop_after:
            raise KeyboardInterrupt

    out, progress = tmp_path / "out.csv", []
    with pytest.raises(KeyboardInterrupt):
        write_to(out, run, open_inputs([pictures / "val"]), progress=stop)
    assert not out.exists()
    # A process that is killed while it writes a batch leaves such a file.
    (partial := tmp_path / "out.csv.partial").write_bytes(partial.read_bytes()[:-7])
    content = predict_to_file(run, [pictures / "val"], out, progress=lambda done, errors: progress.append(done))
    assert content == val_predictions
    assert progress == [done for done in (64, 128, 150) if done > (stop_after - 1) // 64 * 64]


def test_a_second_prediction_to_the_same_file_is_rejected(run, pictures, tmp_path):
    out = tmp_path / "out.csv"
    with out.with_name("out.csv.partial").open("ab") as first:
        assert try_lock(first)
        with pytest.raises(InputError, match=r"out\.csv\.partial: another command is writing there; wait"):
            predict_to_file(run, [pictures / "val"], out)
    assert not out.exists()


def test_the_prediction_batch_size_depends_only_on_the_number_of_images():
    assert [images_at_once(count) for count in (1, 2, 3, 33, 64, 65, 10**6)] == [1, 2, 4, 64, 64, 64, 64]


def test_the_probabilities_of_several_runs_are_averaged_by_weight(run, workdir, pictures, tmp_path):
    other = replace(run, state=run.state.replace(params=jax.tree.map(lambda leaf: -3 * leaf, run.state.params)))
    files = [*(pictures / "val").rglob("*.jpg")][:20]
    first, second = (each.predict(files).probabilities.astype(np.float64) for each in (run, other))
    assert np.abs(first - second).max() > 0.1
    for weights, mean in (((), (first + second) / 2), ((1, 3), (first + 3 * second) / 4)):
        assert np.abs(Ensemble.of([run, other], weights).predict(files).probabilities - mean).max() < 1e-7
    out, mirrored = tmp_path / "a.csv", replace(run, config=run.config.replace(eval={"views": "mirror"}))
    assert main(["predict", str(workdir), *map(str, files), "--out", str(out), "--eval.views", "mirror"]) == 0
    assert out.read_bytes() == predict_to_file(mirrored, files, tmp_path / "b.csv") != predict_to_file(run, files, out)
    for classes, fault in (("bacde", "has the same classes in another order"), ("abcdz", "has other classes")):
        changed = replace(run, directory=Path("B"), signature=replace(run.signature, class_ids=tuple(classes)))
        with pytest.raises(InputError, match=rf"B: {fault} \({classes[0]}, .*give runs with the classes of {workdir}"):
            Ensemble.of([run, changed])


@pytest.mark.slow
def test_the_mean_of_parameters_has_batch_statistics_of_its_own(run, workdir, pictures, tmp_path, capfd, monkeypatch):
    out = tmp_path / "soup"
    assert main(["export", "--average", str(workdir), str(workdir), "--out", str(out), "--format", "hub"]) == 0
    assert "arrays of mean of step 6 of" in capfd.readouterr().out
    assert "These are the weights of 2 runs, averaged. They were not" in (out / "README.md").read_text()
    soup = averaged([workdir, workdir], "best")
    assert all(map(np.array_equal, jax.tree.leaves(soup.state.params), jax.tree.leaves(run.state.params)))
    files = [*(pictures / "train").rglob("*.jpg")]
    batch = next(iter(open_inputs(files).eval_batches(EvalOrder(20, 20), run.signature.data(run.config.data))))

    def moved(model_state: Any) -> float:
        """Return how far a training step would move the running statistics, relative to them."""
        images, key = run.preprocess(batch, train=False).images[None], jax.random.key(0)
        apply = partial(run.model.apply, run.state.params, model_state, train=True, key=key)
        after = jax.tree.map(lambda leaf: leaf[0], jax.vmap(apply, axis_name=AXIS)(images)[1])
        return optax.tree.norm(jax.tree.map(jax.numpy.subtract, after, model_state)) / optax.tree.norm(after)

    assert moved(soup.state.model_state) < 0.3 * moved(run.state.model_state)
    # Frozen layers keep theirs.
    frozen = replace(file := recipe_of_run(workdir), config=file.config.replace(model={"freeze": "all but fc"}))
    monkeypatch.setattr("jaxddp.inference.exports.recipe_of_run", lambda _: frozen)
    assert largest_difference(averaged([workdir, workdir], "best").state.model_state, run.state.model_state) == 0
    plain = ["export", str(workdir), str(workdir), "--out", "a.onnx"]
    assert fails(plain, capfd) == "jaxddp: export: 2 runs; give one run, or --average and several runs"


@pytest.mark.ci
def test_a_sweep_of_folds_predicts_each_image_once_and_its_runs_predict_together(pictures, tmp_path, capfd, caplog):
    options = ["--train.duration", "2 steps", "--eval.every", "2 steps", "--folds", "2", "--eval.metrics", "top1,f1"]
    options += ["--loss.name", "bce"]
    words = ["sweep", *train_words(pictures / "train", tmp_path / "sweep", *LEAN, *options)[1:]]
    predict = ["predict", str(tmp_path / "sweep"), str(pictures / "val"), "--out", str(tmp_path / "mean.csv")]
    assert main([*words, "--index", "0"]) == main([*words, "--index", "1"]) == main(words) == main(predict) == 0
    shown = capfd.readouterr().out
    rows = rows_of((tmp_path / "sweep/out_of_fold.csv").read_bytes())
    runs = [tmp_path / f"sweep/fold={fold}-of-2" for fold in "01"]
    ids = [open_splits(recipe_of_run(each).config.data)["val"].id.tolist() for each in runs]
    assert [(row["id"].encode(), int(row["fold"])) for row in rows] == [(id, n) for n in (0, 1) for id in ids[n]]
    assert len({row["id"] for row in rows}) == 20 and all(row["label"] == row["id"][0] for row in rows)
    hits = np.array([row["class"] == row["label"] for row in rows])
    folds = [100 * hits[[row["fold"] == fold for row in rows]].mean() for fold in "01"]
    over_folds = rf"{np.mean(folds):.2f} ± {abs(folds[0] - folds[1]) / 2:.2f}%"
    assert re.search(rf"top-1 +{100 * hits.mean():.2f}% +{over_folds}", shown) and " f1_micro " in shown
    assert f"mean.csv: {COUNT} images, mean of step 2 of {runs[0]}, step 2 of {runs[1]}" in shown
    assert "--explain: draws on which pixels one network depends" in fails([*predict, "--explain", "a"], capfd)
    losses = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"] for run in runs]
    assert re.search(rf" loss +{np.mean(losses):.4f} ", shown)
    # With other data, a run may have trained on images of its fold.
    new = Path(shutil.copy(next((pictures / "train/a").iterdir()), pictures / "train/a/new.jpg"))
    assert f"{runs[0]}: the data have changed since, so it may have trained on" in fails(words, capfd)
    assert main(["eval", str(runs[0])]) == 0 and "train: changed since the run, which may have tra" in caplog.text
    new.unlink()
    (runs[1] / "result.json").unlink()
    assert "fold=1-of-2 of its 2 runs not finished; the command" in fails(predict, capfd)


def fake_run(step: int = 6, bad_rows: tuple[int, ...] = (), resize: int = 256) -> Any:
    """Return a run that predicts equal probabilities, and errors for the images of `bad_rows`."""

    def stream(source, at_once):
        for start in range(0, len(source), at_once):
            rows = range(start, min(start + at_once, len(source)))
            errors = {row: f"row {row} is cut short" for row in rows if row in bad_rows}
            yield BatchOutputs(start, np.full((len(rows), 5), 0.2, np.float32), errors)

    names = tuple("abcde")
    of_run = {"topology": Topology.create(1), "identity": {"run": "run", "step": step}}
    of_run["config"] = Config(data=DataConfig(resize=resize))
    signature = SimpleNamespace(label_form="one label")
    return SimpleNamespace(stream=stream, signature=signature, class_ids=names, class_names=names, **of_run)


def predict_rows(run: Any, out: Path, count: int = 70, seed: int = 0, **options) -> list[dict[str, str]]:
    table: Any = random_table(count, seed=seed, image=1)
    write_to(out, run, table, **options)
    return rows_of(out.read_bytes())


def test_an_error_is_in_the_row_of_its_image_also_after_the_first_batch(tmp_path):
    rows = predict_rows(fake_run(bad_rows=(3, 69)), tmp_path / "out.csv")
    faults = {row["id"]: row["error"] for row in rows if row["error"]}
    assert faults == {"3": "row 3 is cut short", "69": "row 69 is cut short"}


@pytest.mark.parametrize(("least", "name"), [(0.2, "a"), (0.21, "unknown")])
def test_a_class_is_unknown_below_the_least_confidence_and_not_at_it(tmp_path, least, name):
    assert {row["class"] for row in predict_rows(fake_run(), tmp_path / "out.csv", min_confidence=least)} == {name}


@pytest.mark.parametrize(
    ("step", "seed", "top", "resize", "repeated"),
    [(6, 0, 5, 256, 0), (7, 0, 5, 256, 1), (6, 1, 5, 256, 1), (6, 0, 4, 256, 1), (6, 0, 5, 257, 1)],
)
def test_an_unfinished_prediction_is_identified_by_step_images_class_count_and_settings(
    tmp_path, caplog, step, seed, top, resize, repeated
):
    def stop(done: int, errors: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_rows(fake_run(), tmp_path / "out.csv", progress=stop)
    progress: list[int] = []
    options = {"top": top, "progress": lambda done, errors: progress.append(done)}
    assert len(predict_rows(fake_run(step, resize=resize), tmp_path / "out.csv", seed=seed, **options)) == 70
    assert progress == ([64, 70] if repeated else [70])
    assert ("holds rows of other images" in caplog.text) == repeated


@pytest.mark.parametrize("line", ["{}", "3", "no JSON", "[" * 500_000, None])
def test_an_invalid_or_missing_row_of_predictions_raises_an_error_and_writes_no_file(line, tmp_path):
    out, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"

    def damage(done: int, errors: int) -> None:
        rows = partial.read_text().splitlines()
        partial.write_text("".join(f"{row}\n" for row in ([*rows, line] if line else rows[:-1])))

    message = r":\d+: no row of predictions: .*" if line else ": 68 rows for 70 images"
    with pytest.raises(InputError, match=rf"out\.csv\.partial{message}; remove the file"):
        predict_rows(fake_run(), out, progress=damage)
    assert not out.exists()


@pytest.fixture
def unusable_images(pictures, tmp_path) -> Path:
    """Return a folder of images, of which four cannot be used: truncated JPEG, empty file, text, and GIF."""
    folder = tmp_path / "spoiled"
    folder.mkdir()
    for path in sorted((pictures / "val" / "a").iterdir())[:12]:
        (folder / path.name).write_bytes(path.read_bytes())
    names = sorted(folder.iterdir())
    names[0].write_bytes(names[0].read_bytes()[: names[0].stat().st_size // 2])
    names[5].write_bytes(b"")
    names[6].write_text("not an image")
    (folder / "zebra.gif").write_bytes(b"GIF89a")
    return folder


@pytest.mark.slow
def test_an_unusable_image_has_a_row_with_its_error(run, unusable_images, val_predictions, tmp_path):
    (unusable_images / "zoo.png").symlink_to("nowhere")
    rows = rows_of(predict_to_file(run, [unusable_images], tmp_path / "out.csv", top=9))
    names = sorted(path.name for path in unusable_images.iterdir())
    assert [row["id"] for row in rows] == names
    errors = {row["id"]: row["error"] for row in rows if row["error"]}
    assert list(errors) == [names[0], names[5], names[6], "zebra.gif", "zoo.png"]
    assert errors[names[0]].startswith(f"{unusable_images / names[0]}: ")
    assert errors[names[5]].endswith("the image is empty")
    assert errors["zoo.png"].startswith(f"{unusable_images / 'zoo.png'}: the image cannot be read")
    assert all(not row["class"] and not row["probability_5"] for row in rows if row["error"])
    predictions = {row["id"]: row for row in rows_of(val_predictions)}
    for row in rows:
        if not row["error"]:
            expected = predictions[f"a/{row['id']}"]
            assert row["class"] == expected["class"]
            assert float(row["probability"]) == pytest.approx(float(expected["probability"]), rel=1e-5)


@pytest.mark.slow
def test_every_output_format_has_the_same_predictions(run, pictures, unusable_images, tmp_path):
    contents = {
        form: predict_to_file(run, [unusable_images], tmp_path / f"out.{form}", form=form, top=2) for form in FORMATS
    }
    rows = rows_of(contents["csv"])
    assert list(rows[0]) == ["id", "class", "probability", "class_2", "probability_2", "error"]
    lines = [json.loads(line) for line in contents["jsonl"].splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert [{name: "" if value is None else str(value) for name, value in line.items()} for line in lines] == rows
    assert [str(kind) for kind in table.schema.types] == ["string", "string", "float", "string", "float", "string"]
    for record, line in zip(table.to_pylist(), lines, strict=True):
        assert {name: shortest(value) for name, value in record.items()} == line


def shortest(value: object) -> object:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def test_the_format_kaggle_writes_a_submission_file(run, pictures, tmp_path):
    root = tmp_path / "archive"
    images = sorted((pictures / "val").rglob("*.jpg"))[:3]
    folder = root / "ILSVRC/Data/CLS-LOC/test"
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        (folder / f"test_{number}.JPEG").write_bytes(image.read_bytes())
    listed = [f"test_{number}" for number in (2, 0, 1, 3)]
    (root / TEST_CSV).write_text("ImageId,PredictionString\n" + "".join(f"{name},x 0 0 1 1\n" for name in listed))
    out = predict_to_file(run, [root], tmp_path / "submission.csv", form="kaggle", top=2).decode().splitlines()
    assert out[0] == "ImageId,PredictionString" and [line.split(",")[0] for line in out[1:]] == listed
    with Image.open(images[2]) as image:
        width, height = image.size
    box = f"0 0 {width - 1} {height - 1}"
    ((label, _), (second, _)) = [(token, box) for token in out[1].split(",")[1].split()[::5]]
    assert out[1] == f"test_2,{label} {box} {second} {box}" and {label, second} < set("abcde")
    assert out[4] == "test_3,"


def test_an_output_that_is_not_finite_is_an_error(run):
    predictions = run.predict(np.zeros((2, 16, 16, 3), np.uint8))
    predictions.probabilities[1, 0] = np.nan
    rows = list(type(predictions)(["x", "y"], predictions.probabilities, run.class_ids, run.class_names).rows(1))
    assert rows[0]["error"] is None and rows[1]["error"] == "the network's output is not finite"


@pytest.mark.slow
def test_a_run_predicts_the_same_for_arrays_and_files(run, pictures):
    files = sorted((pictures / "val" / "b").iterdir())[:3]
    of_files = run.predict(files)
    data = run.signature.data(run.config.data)
    batch = next(iter(open_inputs(files).eval_batches(EvalOrder(3, 4), data)))
    of_arrays = run.predict(batch.image[:3])
    assert of_files.ids == [str(file) for file in files] and of_arrays.ids == ["0", "1", "2"]
    assert np.array_equal(of_files.probabilities, of_arrays.probabilities)
    assert np.array_equal(run.predict(batch.image[:3] / 255).probabilities, of_files.probabilities)
    assert of_files.classes == [of_files.class_names[label] for label in of_files.labels]
    labels, probabilities = of_files.top(2)
    assert np.array_equal(labels[:, 0], of_files.labels)
    assert np.array_equal(probabilities[:, 0], of_files.probabilities.max(1))
    frame = of_files.to_frame(top=9)
    assert list(frame.columns)[:3] == ["id", "class", "probability"] and len(frame) == 3 and len(frame.columns) == 12
    images = run.preprocess(batch, train=False).images
    logits, _ = run.model.apply(run.state.params, run.state.model_state, images, train=False, key=None)
    assert np.allclose(jax.nn.softmax(logits)[:3], of_files.probabilities, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("{run} {val} --out a.txt", "a.txt: its extension names no format; there are: csv, jsonl, parquet, or give"),
        ("{val} {val} --out a.csv", "{val}/config.json: no such file; give a run's work directory"),
        ("nowhere {val} --out a.csv", "nowhere: no such work directory"),
        ("{run} {val} --out a.csv --step 7", "{run}/checkpoints: no checkpoint '7'; give latest, best or one of the"),
        ("{run} {val} {val} --out a.csv", "{val}/a/{first}: is given twice; give each image once"),
        ("{run} twice.csv --out a.csv", "{tmp}/twice.csv:3: '{val}/a/{first}' is also in {tmp}/twice"),
        ("{run} {val} --out {val} --format csv", "{val}: is one of the images; give another"),
        ("{run} {val} --out {run} --format csv", "{run}: is a folder; give the name of a file"),
        ("{run} {val} --out no/where/a.csv", "no/where/a.csv: cannot be written"),
        ("{run} {val} --out a --format kaggle --min-confidence 0.9", "--format kaggle: --min-confidence and"),
        ("{run} {run} {val} --out a.csv --weights 1", "--weights 1: give a weight for each of 2 runs, not all 0"),
        ("{run} {val} --guard-formulas --out a.jsonl", "--guard-formulas: applies to csv only, and a.jsonl is jsonl"),
    ],
)
def test_a_mistake_in_predict_raises_a_one_line_error(workdir, pictures, arguments, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    first = sorted(path.name for path in (pictures / "val" / "a").iterdir())[0]
    paths = {"run": workdir, "val": pictures / "val", "first": first, "tmp": tmp_path}
    Path("twice.csv").write_text("path\n" + "{val}/a/{first}\n".format(**paths) * 2)
    assert fails(["predict", *arguments.format(**paths).split()], capfd).startswith("jaxddp: " + line.format(**paths))


@pytest.mark.slow
def test_a_run_from_python_needs_its_model_for_predictions(tmp_path):
    table, val = random_table(16, image=8), random_table(6, seed=1, image=8)
    setup = jaxddp.prepare_training(linear_model(), table, 2, sgd(0.1), 4, epochs=2)
    state, _ = jaxddp.train(jaxddp.softmax_cross_entropy, setup, workdir=tmp_path, val=val, listeners=())
    with pytest.raises(InputError, match="came from Python and its config does not name the network; give model= too"):
        jaxddp.load_run(tmp_path)
    predictions = jaxddp.load_run(tmp_path, 4, model=linear_model(), devices=2).predict(val)
    logits = setup.measured.predict(state.params, {}, (val.images / 255 - MEAN) / STD)
    assert np.allclose(predictions.probabilities, jax.nn.softmax(logits), atol=1e-6)
    assert predictions.class_names == tuple("abcde")
    assert jaxddp.evaluate(state, setup, val)["top1"] == np.mean(predictions.labels == val.labels)
    with pytest.raises(InputError, match=r"params/weight is \[192, 5\] in the checkpoint and \[192, 3\] in the model"):
        jaxddp.load_run(tmp_path, model=linear_model(3))


MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


def test_arguments_of_a_loaded_run_are_checked(workdir, run, pictures, tmp_path):
    table = random_table(4, image=16)
    wide = jaxddp.ArrayTable(table.images.astype(np.uint16), table.labels, table.class_names)
    for images, message in (
        (np.zeros((2, 8, 8, 3), np.uint8), "images: uint8[2, 8, 8, 3] was given; give uint8[N, 16, 16, 3]"),
        (np.full((2, 16, 16, 3), -1.0), "images of float64 from -1 to -1: give floats from 0 to 1"),
        (np.full((2, 16, 16, 3), 0.3), "images: float64[2, 16, 16, 3] was given; give uint8[N, 16, 16, 3]"),
        (5, "images=5: give an array, a path, a list of paths, or a source"),
        ("nowhere", "nowhere: no such file or folder"),
        ([], "no images are given"),
        (wide, "pixels of uint16: the network was trained on uint8"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            run.predict(images)
    copy = shutil.copytree(workdir, tmp_path / "copy")
    (copy / SIGNATURE_FILE).unlink()
    without = f"{copy}: has no signature.json, which a run writes at its start"
    cases = [
        (lambda: restore_run(copy, "6", Topology.create(1)), without),
        (lambda: run.show(table, "x"), "rows='x': give numbers of rows of the source, 0 to 3"),
        (lambda: run.show(table, [4]), "rows=[4]: give numbers of rows of the source, 0 to 3"),
        (lambda: run.show("photos", [0]), "source='photos': give a table"),
        (lambda: run.outcome(open_inputs([pictures / "val"])), "the source: "),
        (lambda: run.outcome(table.select(["a", "b"])), "the source has other classes than the run; give the run's"),
        (lambda: run.predict(table).top("x"), "k='x': expected a whole number"),
        (lambda: run.predict(table).top(6), "k=6: expected 1 to 5, the number of classes"),
        (lambda: jaxddp.export_program(5, "net.onnx"), "run=5: give what jaxddp.load_run returns"),
        (lambda: jaxddp.export_program(run, "net.onnx", "pt"), "form='pt': expected"),
        (lambda: jaxddp.export_program(run, "net.txt"), "net.txt: its extension names no format; there are: onnx, "),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=re.escape(message)):
            call()
    outcome, figure = run.outcome(table), run.show(table, [2, 0])
    assert outcome.confusion.sum() == 4 and len(figure.axes) == 2
