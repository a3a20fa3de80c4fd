"""A wrong argument of the Python API raises a one-line error with the argument and its value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import CLASSES, random_table
from support.errors import error_line
from support.networks import linear_model
from support.peers import Second
from support.shared import sgd

import jaxddp
from jaxddp import prepare_training, train
from jaxddp.core.peers import ALONE
from jaxddp.engine.state import TrainState

TABLE, VAL, KEY = random_table(16), random_table(12, seed=1), jax.random.key(1)
SGD = sgd(0.05)
SOURCE = "give a table of open_data(PATH), an ArrayTable(images, labels, class_names) or another source"
DRAWN = (
    "augmentation: two traces differ, as if by numpy.random, and a compiled step repeats one of them; draw random "
    "numbers from the key by jax.random"
)


class IncompleteSource:
    """A data source without some of the required methods."""

    labels = np.zeros(3, np.int32)
    num_classes = 1
    class_names = class_ids = ("a",)

    def name(self, row):
        return f"image {row}"


class StepOfTwoArguments:
    def step(self, before, after):
        pass


class AsyncEnd:
    async def end(self, run):
        pass


@pytest.fixture(scope="module")
def setup() -> jaxddp.RunSetup:
    return prepare_training(linear_model(), TABLE, 2, SGD, 4, epochs=3)


@pytest.fixture(scope="module")
def trained(setup) -> TrainState:
    return train(jaxddp.softmax_cross_entropy, setup, listeners=())[0]


PREPARED = [
    ("model", 3, "model is of type int; give a Linen module, an NNX module or a function (rngs) that returns one, a "
     "pair of functions (init, apply), or an object with a Model's two methods"),
    ("table", [[1, 2], [3]], f"table=[[1, 2], [3]]: {SOURCE}"),
    ("table", TABLE.images, f"table: an object of type ndarray was given; {SOURCE}"),
    ("table", IncompleteSource(), "table: an object of type IncompleteSource was given; it has no default_data, which "
     "a source has; see jaxddp.data.source.Source"),
    ("devices", "2", "devices='2': give a number of devices, a list of them, or None for all"),
    ("devices", 2.0, "devices=2.0: give a number of devices, a list of them, or None for all"),
    ("devices", [], "devices=[]: give a number of devices, a list of them, or None for all"),
    ("optimizer", 0.1, "optimizer: an object of type float was given; give an optax optimizer, such as optax.sgd(0.1)"),
    ("batch_size_per_device", "8", "batch_size_per_device='8': expected a whole number, 1 to 16,777,216"),
    ("batch_size_per_device", 4.5, "batch_size_per_device=4.5: expected a whole number, 1 to 16,777,216"),
    ("batch_size_per_device", 0, "batch_size_per_device=0: expected 1 to 16,777,216"),
    ("epochs", float("nan"), "epochs=nan: expected above 0, at most 1,000,000,000"),
    ("epochs", [3], "epochs=[3]: expected a number, above 0, at most 1,000,000,000"),
    ("seed", -1, "seed=-1: expected 0 to 9,223,372,036,854,775,807"),
    ("batch_size_per_device", 2**24, "a global batch of 33554432: expected 1 to 16,777,216"),
    ("data", {"pad": 1}, "data={'pad': 1}: give a jaxddp.DataConfig, such as DataConfig(image_size=64)"),
    ("data", jaxddp.DataConfig(limit=3), "data.limit=3: from Python, the table is used as it is; open_data has "
     "arguments for classes, val_share and fold, and table.take(N) returns fewer examples"),
    ("data", jaxddp.DataConfig(weight_column="w"), "data.weight_column='w': from Python, the table is used as it is; "
     "give this to open_data"),
    ("seed", "0", "seed='0': expected a whole number, 0 to 9,223,372,036,854,775,807"),
    ("metrics", ["top3"], "metrics: an object of type list was given; give a dict of name to function"),
    ("metrics", {"top3": 3}, "metrics: top3: an object of type int was given; give a function of (logits, labels)"),
    ("augmentation", "flip", "augmentation='flip': give a function of (key, image)"),
    ("augmentation", lambda key, image: image + np.random.rand(), DRAWN),
    ("augmentation", lambda key, image: image + jax.random.normal(KEY) * np.random.rand(3), DRAWN),
    ("augmentation", lambda key: key, "augmentation: <lambda>(key) is called as <lambda>(key, image): too many "
     "positional arguments"),
    ("initialize", lambda params: params, "initialize: <lambda>(params) is called as <lambda>(params, model_state): "
     "too many positional arguments"),
    ("objective", lambda: None, "objective: <lambda>() is called as <lambda>(supervised): too many positional "
     "arguments"),
    ("metrics", {"own": lambda logits, labels: logits}, "metrics: own: returned float32[9, 5] for logits float32[9, 5] "
     "and labels int32[9]; return one number for each example, float[B]"),
    ("parts", "ema", "parts: an object of type str was given; give a list of jaxddp.engine.parts.part.Part"),
    ("accumulate", "2", "accumulate='2': expected a whole number, 1 to 65,536"),
    ("max_bad_steps", -1, "max_bad_steps=-1: expected 0 to 1,000,000"),
    ("precision", "half", "precision='half': expected 'float32' or 'bfloat16' or 'float16'"),
    ("reproducible", "yes", "reproducible='yes': expected True or False"),
    ("buckets", 0, "buckets=0: expected 1 to 1,024"),
    ("val", 1, "prepare_training: unknown option 'val'; it is an argument of train: train(…, val=…)")
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value", "expected"), PREPARED)
def test_prepare_training_names_the_bad_argument(argument, value, expected):
    arguments = {"model": linear_model(), "table": TABLE, "devices": 2, "optimizer": SGD, "batch_size_per_device": 4}
    assert error_line(prepare_training, **{**arguments, argument: value}) == expected


def test_invalid_arrays_and_settings_are_rejected_on_creation():
    message = "data.crop='wholee': expected 'random_area' or 'whole', did you mean 'whole'?"
    assert error_line(jaxddp.DataConfig, crop="wholee") == message
    assert error_line(jaxddp.DataConfig, image_size="6") == "data.image_size='6': expected a whole number, 1 to 10,000"
    assert error_line(jaxddp.AugmentConfig, flip="no") == "data.augment.flip='no': expected True or False"


def test_prepare_training_rejects_an_unknown_option_and_a_repeated_device():
    model_and_table = (linear_model(), TABLE)
    for typo, meant in (("epoch", "epochs"), ("acumulate", "accumulate"), ("grad_clip", "clip_norm")):
        message = error_line(prepare_training, *model_and_table, 2, SGD, 4, longest=2000, **{typo: 3})
        assert message.startswith(f"prepare_training: unknown option '{typo}'; did you mean '{meant}'? there are: acc")
    message = error_line(prepare_training, *model_and_table, 2, SGD, 4, class_weights=[1, 2])
    assert message.endswith("; the loss of train has it: jaxddp.losses.cross_entropy(class_weights=…)")
    message = error_line(prepare_training, *model_and_table, [device := jax.devices()[1], device], SGD, 4)
    assert message == f"devices: {device} is given twice; give each device once"
    assert prepare_training(*model_and_table, np.array(jax.devices()[:2]), SGD, 4).topology.num_devices == 2


def weight_norm(state):
    return {"norm": jnp.linalg.norm(state.params["weight"])}


def branching(step):
    return 1.0 if step < 5 else 0.1


def loss_of_logits_shape(logits, labels):
    return logits


FORMS = '"90 epochs", "5000 steps", "1_000_000 examples" or "5%" (of the run), up to 1e+18'
TRAINED = [
    ("loss", 0.5, "loss: an object of type float was given; give a function of (logits, labels)"),
    ("loss", branching, "loss branching: fails for logits float32[9, 5] and labels int32[9]: TypeError: branching() "
     "takes 1 positional argument but 2 were given"),
    ("loss", loss_of_logits_shape, "loss loss_of_logits_shape: returned float32[9, 5] for logits float32[9, 5] and "
     "labels int32[9]; return one loss per example (float[B]), their mean (float[]), or (sum, weight)"),
    ("setup", jaxddp.softmax_cross_entropy, "setup: an object of type function was given; give what prepare_training "
     "returned"),
    ("val", [1, 2], f"val=[1, 2]: {SOURCE}"),
    ("schedule", 0.1, "schedule=0.1: give a function of the step, such as optax.cosine_decay_schedule(1.0, steps)"),
    ("schedule", branching, "schedule: fails for a step int32[] (TracerBoolConversionError: Attempted boolean "
     "conversion of traced array with shape bool[].); give a function that JAX can trace, with jnp.where for if"),
    ("schedule", lambda step: jnp.ones(3), "schedule: returned float32[3] for a step; return one number"),
    ("schedule", lambda step: (step, step), "schedule: returned int32[2] for a step; return one number"),
    ("epochs", "3", f"epochs: '3' is not a duration; write {FORMS}"),
    ("epochs", 0, "epochs=0.0: expected above 0, at most 1,000,000,000"),
    ("listeners", jaxddp.History(), "listeners: an object of type History was given; give a list of listeners"),
    ("listeners", [StepOfTwoArguments()], "listeners: StepOfTwoArguments.step(before, after) is called as "
     "StepOfTwoArguments.step(record): missing a required argument: 'after'"),
    ("listeners", [AsyncEnd()], "listeners: AsyncEnd.end is an async function; define a plain one, def "
     "AsyncEnd.end(run)"),
    ("log_to", "tensorbord", "log_to='tensorbord': the output of loggers is written into the work directory; give "
     "workdir too"),
    ("evaluators", weight_norm, "evaluators: an object of type function was given; give a list of functions of the "
     "state"),
    ("evaluators", ["norm"], "evaluators='norm': give a function of the state"),
    ("evaluators", [weight_norm], "evaluators=[weight_norm]: they are measured at evaluations; give val too"),
    ("log_every", "soon", f"log_every: 'soon' is not a duration; write {FORMS}"),
    ("eval_every", 3, "eval_every=3: expected a duration, such as '90 epochs'"),
    ("save_every", "1e999999999 epochs", f"save_every: '1e999999999 epochs' is not a duration; write {FORMS}"),
    ("log_every", 10, "log_every=10: expected a duration, such as '90 epochs'"),
    ("self_test", "sometimes", "self_test='sometimes': expected 'auto' or 'always' or 'never'"),
    ("log_project", "p", "log_project='p' has no effect without wandb or mlflow in log_to; leave it out"),
    ("profile", "9 steps", "profile='9 steps': a trace is written into the work directory; give workdir too")
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value", "expected"), TRAINED)
def test_train_names_the_bad_argument(argument, value, expected, setup, tmp_path, monkeypatch):
    arguments = {"loss": jaxddp.softmax_cross_entropy, "setup": setup, "listeners": (), argument: value}
    assert error_line(train, **arguments) == expected
    if argument == "log_to":
        assert "did you mean 'tensorboard'? there are: " in error_line(train, **arguments, workdir=tmp_path)
        (tmp_path / "r\udcfc").mkdir()
        monkeypatch.chdir(tmp_path / "r\udcfc")
        assert ": the path is not UTF-8; choose another, or set" in error_line(train, **arguments, workdir="w")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.5, "evaluators: measure returned an object of type float; return a dict of numbers"),
        ({"norm": "large"}, "evaluators: measure returned norm='large': return a number"),
        ({"norm": np.ones(2)}, "evaluators: measure returned norm: an object of type ndarray was given; return a "
         "number"),
        ({"epoch": 1}, "evaluators: measure: 'epoch' cannot be the name of a metric; give another"),
        ({"top1": 1}, "evaluators: top1 is measured already; give it another name")
    ]
)  # fmt: skip
def test_invalid_results_of_an_evaluator_are_rejected(returned, expected, setup):
    def measure(state):
        return returned

    options = {"val": VAL, "evaluators": [measure], "listeners": ()}
    assert error_line(train, jaxddp.softmax_cross_entropy, setup, **options) == expected
    message = error_line(train, jaxddp.softmax_cross_entropy, setup, **options, eval_every="0 steps")
    assert message == "evaluators=[measure]: they are measured at evaluations; eval_every disables evaluation"


def test_train_rejects_a_finished_state_and_a_state_of_another_setup(setup, trained, tmp_path):
    loss, finished_setup = jaxddp.softmax_cross_entropy, dataclasses.replace(setup, state=trained)
    for workdir in (None, tmp_path / "w"):
        message = error_line(train, loss, finished_setup, workdir=workdir, listeners=())
        assert message == "state: it is at step 6, and 3 epochs end at step 6; give more epochs"
    message = error_line(train, loss, finished_setup, epochs=0.5, listeners=())
    assert message == "state: it is at step 6, and 0.5 epochs end at step 1; give more epochs"
    assert int(train(loss, finished_setup, epochs=6, listeners=())[0].step) == 12
    # `train` returns the final state of a finished run in a work directory.
    finished, _ = train(loss, setup, workdir=tmp_path / "done", listeners=())
    repeated, _ = train(loss, dataclasses.replace(setup, state=finished), workdir=tmp_path / "done", listeners=())
    assert int(repeated.step) == 6
    momentum = prepare_training(linear_model(), TABLE, 2, sgd(0.05, momentum=0.9), 4, epochs=9)
    fault = "state: opt_state/0/trace/weight is absent, and float32[108, 5] in this setup"
    message = error_line(train, loss, dataclasses.replace(momentum, state=trained), listeners=())
    assert message == f"{fault}; give a state of its model and optimizer"


def test_invalid_results_of_user_objects_are_rejected(setup):
    def train_with(optimizer=SGD, **options):
        other = prepare_training(linear_model(), TABLE, 2, optimizer, 4, **options)
        return error_line(train, jaxddp.softmax_cross_entropy, other, listeners=())

    message = train_with(optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: updates))
    assert message == "optimizer: its update returned an object of type dict; return a pair (updates, state)"
    message = train_with(objective=lambda supervised: 5)
    assert message == "objective: it returned an object of type int; return a function (params, model_state, batch, …)"


def test_a_listener_may_have_only_some_of_the_methods(setup):
    class PartialListener:
        steps = ()

        def step(self, record):
            self.steps += (record.step,)

    listener = PartialListener()
    train(jaxddp.softmax_cross_entropy, setup, listeners=[listener], log_every="1 step")
    assert listener.steps == (1, 2, 3, 4, 5, 6)
    listener.first_steps = None
    fault = "listeners: PartialListener.first_steps is None; define a method PartialListener.first_steps(self, record)"
    assert error_line(train, jaxddp.softmax_cross_entropy, setup, listeners=[listener]) == fault


def evaluation_calls(setup, state):
    yield lambda: jaxddp.evaluate(state, setup, VAL)
    yield lambda: jaxddp.topk_accuracy(state, setup, VAL)
    yield lambda: jaxddp.show_predictions(state, setup, VAL)
    yield lambda: jaxddp.export_weights(state, setup, "w.safetensors")


def test_evaluate_accepts_only_a_state_of_its_setup(setup, trained):
    other_images = prepare_training(linear_model(), random_table(16, image=5), 2, SGD, 4).state
    four_device_setup = prepare_training(linear_model(), TABLE, 4, SGD, 2)
    for call in evaluation_calls(setup, (trained, jaxddp.History())):
        assert error_line(call).startswith("state=(TrainState(")
        assert error_line(call).endswith(": give a TrainState, which is the first value that train returns")
    for call in evaluation_calls(setup, other_images):
        assert error_line(call) == (
            "state: params/weight is float32[75, 5], and float32[108, 5] in this setup; give a state of its model and "
            "optimizer"
        )
    for call in evaluation_calls(trained, setup):
        assert error_line(call) == "setup: an object of type TrainState was given; give what prepare_training returned"
    for call in evaluation_calls(four_device_setup, trained):
        assert error_line(call) == (
            "state: it is on 2 devices, which are not the 4 of this setup; give "
            "setup.topology.replicate(jax.device_get(state))"
        )
    moved = four_device_setup.topology.replicate(jax.device_get(trained))
    assert jaxddp.evaluate(moved, four_device_setup, VAL) == pytest.approx(jaxddp.evaluate(trained, setup, VAL))
    four_device_setup.step()(moved, next(four_device_setup.batches(0, 1)))
    assert all("a step consumed it" in error_line(call) for call in evaluation_calls(four_device_setup, moved))


def test_only_one_process_of_a_job_writes_weights(setup, trained, tmp_path):
    out = tmp_path / "w.safetensors"
    for peers in (Second(), ALONE):
        process_setup = setup.changed(topology=dataclasses.replace(setup.topology, peers=peers))
        jaxddp.export_weights(trained, process_setup, out)
        assert out.exists() == peers.is_first


def test_evaluate_rejects_its_other_invalid_arguments(setup, trained):
    for call in (jaxddp.evaluate, jaxddp.topk_accuracy, jaxddp.show_predictions):
        assert error_line(call, trained, setup, [1]) == f"table=[1]: {SOURCE}"
    no_loss = "was given; give a function of (logits, labels)"
    assert error_line(jaxddp.evaluate, trained, setup, VAL, "mse") == f"loss: an object of type str {no_loss}"
    assert error_line(jaxddp.topk_accuracy, trained, setup, VAL, 6) == "k=6: expected 1 to 5"
    assert error_line(jaxddp.topk_accuracy, trained, setup, VAL, "1") == "k='1': expected a whole number, 1 to 5"
    assert error_line(jaxddp.topk_accuracy, trained, setup, VAL, [1.0]) == "k=1.0: expected a whole number, 1 to 5"
    assert jaxddp.topk_accuracy(trained, setup, VAL, 5) == {5: 1.0}
    assert error_line(jaxddp.show_predictions, trained, setup, VAL, count=0) == "count=0: expected 1 to 1,000"
    assert error_line(jaxddp.export_weights, trained, setup, 5) == "out=5: expected a path"
    assert error_line(setup.with_seed, "1") == "seed='1': expected a whole number, 0 to 9,223,372,036,854,775,807"
    assert error_line(setup.with_loss, 1) == f"loss: an object of type int {no_loss}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"path": 5}, "path=5: expected a path"),
        ({"val_share": "0.1"}, "val_share='0.1': expected a number, above 0, below 1"),
        ({"val_share": 0}, "val_share=0.0: expected above 0, below 1"),
        ({"val_share": 1}, "val_share=1.0: expected above 0, below 1"),
        ({"classes": 3}, "classes=3: expected a text"),
        ({"path": "{}/pest"}, "{}/pest: no such directory or file, did you mean 'pets'?; check path"),
        ({}, "{}/pets: has no validation split; give val_share, such as 0.1 to hold out a tenth of each class"),
        ({"val_share": 0.5}, "{}/pets: class 'cat' has only one example, {}/pets/cat/0.png, but val_share=0.5 needs "
         "two of each class: one to hold out and one to train; add examples, or leave the class out")
    ]
)  # fmt: skip
def test_open_data_names_the_bad_argument(arguments, expected, tmp_path):
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "0.png").touch()
    arguments = {"path": tmp_path / "pets"} | arguments
    if "{}" in str(arguments["path"]):
        arguments["path"] = arguments["path"].replace("{}", str(tmp_path))
    assert error_line(jaxddp.open_data, **arguments) == expected.replace("{}", str(tmp_path))


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("name", 18, "name=18: expected a text"),
        ("num_classes", "10", "num_classes='10': expected a whole number"),
        ("width", "64", "width='64': expected a whole number, 1 to 4,096"),
        ("dtype", "int8", "resnet: dtype='int8'; give \"float32\", \"bfloat16\", \"float16\" or \"float64\""),
        ("widht", 64, "resnet: unknown option 'widht'; did you mean 'width'? there are: batch_norm, blur_pool, "
         "shortcut_norm, stem, weight_init, width, zero_init_last_scale")
    ]
)  # fmt: skip
def test_resnet_names_the_bad_argument(argument, value, expected):
    assert error_line(jaxddp.resnet, **{"name": "resnet18", "num_classes": CLASSES, argument: value}) == expected
