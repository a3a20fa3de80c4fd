"""Valid configs, and messages for invalid configs. `conformance/test_networks.py` runs the built-in configs."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxddp.config import Config, EvalConfig, OptimizerConfig, TrainConfig, load
from jaxddp.config.values import flatten
from jaxddp.core.duration import Cadence, Duration
from jaxddp.core.errors import InputError
from jaxddp.recipe.sources import config_names

CONFIGS = Path(__file__).parent.parent / "configs"

sizes = st.integers(1, 10**7)
durations = st.builds(
    Duration,
    st.fractions(min_value=0, max_value=10**12) | st.integers(0, 10**12).map(Fraction),
    st.sampled_from(["steps", "epochs", "examples", "%"]),
)


@given(durations)
def test_parsing_the_text_of_a_duration_returns_an_equal_duration(duration):
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("90 epochs", 90, "epochs"),
        ("1 step", 1, "steps"),
        ("1_000_000 examples", 10**6, "examples"),
        ("0.1 epochs", Fraction(1, 10), "epochs"),
        ("5%", 5, "%"),
        ("12.5 %", Fraction(25, 2), "%"),
        ("0 steps", 0, "steps"),
    ],
)
def test_durations_are_exact(text, amount, unit):
    assert Duration.parse(text) == Duration(Fraction(amount), unit)


@pytest.mark.parametrize(
    ("duration", "text"),
    [("1 steps", "1 step"), ("2 epoch", "2 epochs"), ("1_000 examples", "1000 examples"), ("5.0 %", "5%")],
)
def test_the_unit_of_a_duration_is_written_in_the_singular_or_plural(duration, text):
    assert str(Duration.parse(duration)) == text


def test_a_section_made_in_python_is_checked_with_the_config():
    with pytest.raises(InputError, match="^train.batch_size=0: expected"):
        Config(train=TrainConfig(batch_size=0))


@pytest.mark.parametrize(
    "text", ["", "5", "five epochs", "5 parsecs", "5epochs", "5 %s", "-1 epochs", "nan steps", "1/0 epochs"]
)
def test_an_invalid_duration_gets_a_list_of_valid_forms(text):
    message = 'is not a duration; write "90 epochs", "5000 steps", "1_000_000 examples" or "5%"'
    with pytest.raises(InputError, match=message) as error:
        Duration.parse(text)
    assert repr(text) in str(error.value)


@given(durations, sizes, sizes, sizes)
def test_a_duration_ends_with_the_first_step_that_covers_it(duration, num_examples, batch_size, total_steps):
    run = {"num_examples": num_examples, "batch_size": batch_size, "total_steps": total_steps}
    steps = duration.steps(**run)
    examples_of_unit = {
        "steps": batch_size,
        "epochs": num_examples,
        "examples": 1,
        "%": Fraction(total_steps * batch_size, 100),
    }
    examples = duration.amount * examples_of_unit[duration.unit]
    assert duration.examples(**run) == examples
    assert steps * batch_size >= examples > (steps - 1) * batch_size


@given(st.integers(0, 10**4), sizes, sizes)
def test_the_last_step_of_an_epoch_is_rounded_up(epochs, num_examples, batch_size):
    steps = Duration.parse(f"{epochs} epochs").steps(num_examples=num_examples, batch_size=batch_size)
    assert steps == -(-epochs * num_examples // batch_size)


def test_a_percentage_needs_the_length_of_a_run():
    with pytest.raises(InputError, match='"5%": a percentage needs a run of known length'):
        Duration.parse("5%").steps(num_examples=10, batch_size=2)


@given(st.fractions(min_value=Fraction(1, 3), max_value=500), st.integers(1, 50), st.integers(1, 200))
def test_a_cadence_is_due_at_the_first_step_past_each_multiple(examples, batch_size, total_steps):
    cadence = Cadence(examples, batch_size)
    due = [step for step in range(1, total_steps + 1) if cadence.due(step)]
    multiples = range(1, math.floor(total_steps * batch_size / examples) + 1)
    assert due == sorted({math.ceil(k * examples / batch_size) for k in multiples})
    assert cadence.count(total_steps) == len(multiples)
    if examples >= batch_size:
        assert len(due) == total_steps * batch_size // examples
    else:
        assert len(due) == total_steps


@given(sizes, sizes)
def test_a_cadence_of_zero_is_never_due(batch_size, step):
    assert not Cadence(Fraction(0), batch_size).due(step)


@given(st.integers(1, 60), st.integers(1, 500), st.integers(1, 64))
def test_an_epochs_cadence_is_due_once_an_epoch(epochs, num_examples, batch_size):
    total = Duration.parse(f"{epochs} epochs").steps(num_examples=num_examples, batch_size=batch_size)
    every = Duration.parse("1 epoch")
    cadence = Cadence(every.examples(num_examples=num_examples, batch_size=batch_size), batch_size)
    ends = {-(-epoch * num_examples // batch_size) for epoch in range(1, epochs + 1)}
    assert {step for step in range(1, total + 1) if cadence.due(step)} == ends


def test_a_cadence_is_computed_in_exact_fractions():
    """0.4 epochs of 11 examples are 4.4 examples. 66 / 4.4 is 15, but 14.999… in binary floating point."""
    cadence = Cadence(Duration.parse("0.4 epochs").examples(num_examples=11, batch_size=1), 1)
    assert cadence.count(66) == 15 and cadence.due(66)


def test_a_cadence_in_percent_divides_the_run():
    cadence = Cadence(Duration.parse("25%").examples(num_examples=99, batch_size=7, total_steps=10), 7)
    assert [step for step in range(1, 11) if cadence.due(step)] == [3, 5, 8, 10]


def test_replace_changes_only_the_named_keys():
    before = Config()
    after = before.replace(
        seed=3, train={"duration": "7 epochs"}, data={"mean": [0, 0.5, 1]}, optimizer={"warmup": "1%"}
    )
    old, new = before.flat(), after.flat()
    changed = {key: new[key] for key in new if new[key] != old[key]}
    assert changed == {"seed": 3, "train.duration": "7 epochs", "data.mean": [0.0, 0.5, 1.0], "optimizer.warmup": "1%"}
    assert before.replace(**changed, data={"limit": 9}) == after.replace(data={"limit": 9})
    assert after.train.duration == Duration.parse("7 epochs")
    assert after.data.mean == (0.0, 0.5, 1.0)
    assert before == Config()


KEYS = "config, every, gradient_norm, guard_formulas, images, name, profile, project, to"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trian": {"batch_size": 8}}, "unknown config key 'trian'; did you mean 'train'[?] there are: "),
        ({"trian": {}}, "unknown config key 'trian'; did you mean 'train'[?] there are: "),
        ({"train": {"batchsize": 8}}, "unknown .* 'train.batchsize'; did you mean 'train.batch_size'[?] there are: "),
        ({"log": {"zzz": 1}}, f"unknown config key 'log.zzz'; there are: {KEYS}"),
        ({"seed": True}, "seed=True: expected a whole number"),
        ({"train": 3}, "train is a section; give its keys"),
        ({"train": {"batch_size": "256"}}, "train.batch_size='256': expected a whole number"),
        ({"train": {"duration": 90}}, "train.duration=90: expected a duration, such as '90 epochs'"),
        ({"optimizer": {"learning_rate": "0.1"}}, "optimizer.learning_rate='0.1': expected a number"),
        ({"data": {"path": "a\ud800"}}, r"data.path='a\\ud800': expected text of 1 to"),
        ({"data": {"crop_area": [0.5]}}, r"data.crop_area=\[0.5\]: expected 2 numbers, 0 to 1"),
        ({"data": {"augment": {"flip": "yes"}}}, "data.augment.flip='yes': expected True or False"),
        ({"data": {"crop_area": [1.0, 0.08]}}, r"data.crop_area=\(1.0, 0.08\): give the smallest share of the image"),
        ({"data": {"std": [0.0]}}, "data.std=0.0: expected 1e-06 to 1"),
        ({"loss": {"class_weights": "1,\u0662"}}, "loss.class_weights='\u0662': expected a number"),
        ({"optimizer": {"groups": ["fc:rate=\u0662"]}}, "optimizer.groups: fc:rate='\u0662': expected a number"),
        ({"train": {"duration": "\u0663 epochs"}}, "train.duration: '\u0663 epochs' is not a duration"),
    ],
)
def test_an_unknown_key_or_a_wrong_value_is_rejected(change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        Config().replace(**change)


def test_the_constructor_of_a_section_and_replace_parse_durations():
    config = Config(eval=EvalConfig(every="2 epochs"), optimizer=OptimizerConfig(warmup="5%"))  # pyright: ignore
    assert config == Config().replace(eval={"every": "2 epochs"}, optimizer={"warmup": "5%"})
    assert config.eval.every.amount == 2
    with pytest.raises(InputError, match=r"eval.every.*'90 parsecs' is not a duration; write"):
        Config(eval=EvalConfig(every="90 parsecs"))  # pyright: ignore


def test_only_values_that_convert_without_loss_are_converted():
    config = Config().replace(optimizer={"learning_rate": 1}, data={"path": None})
    assert (config.optimizer.learning_rate, type(config.optimizer.learning_rate)) == (1.0, float)
    assert config.data.path is None
    assert Config().replace(train={"duration": Duration.parse("3 steps")}).train.duration == Duration.parse("3 steps")


def test_flatten_joins_keys_with_dots():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}


@pytest.mark.slow
def test_load_finds_every_config_by_name_and_by_path():
    assert config_names() == sorted(file.stem for file in CONFIGS.glob("*.py")) != []
    for name in config_names():
        config = load(name)
        assert config == load(CONFIGS / f"{name}.py")
        assert config == Config().replace(**json.loads(json.dumps(config.to_dict())))
    assert config == load(str(CONFIGS / f"{name}.py"))


def test_a_missing_work_directory_gets_the_nearest_folder_as_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    with pytest.raises(InputError, match="/demoo' does not exist; did you mean 'demo'[?] give a run, the name of a"):
        load(f"./{'long' * 80}/../demoo")


@pytest.mark.parametrize(("name", "nearest"), [("cifar11", "cifar10"), ("configs/digit.py", "digits")])
def test_a_missing_config_gets_the_nearest_name_as_a_suggestion(name, nearest):
    with pytest.raises(InputError, match=f"'{name}' does not exist; did you mean '{nearest}'[?] there are: .*digits"):
        load(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", r"defines no get_config\(\); define one"),
        ("def get_config():\n    return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def get_config(:", "broken.py:1: SyntaxError: "),
        ("def get_config():\n    return {'seed': 1}", r"get_config\(\) returned a dict; return a jaxddp.config.Config"),
        (
            "from jaxddp.config import Config\ndef get_config():\n    return Config().replace(sed=1)",
            "unknown config key 'sed'; did you mean 'seed'",
        ),
    ],
)
def test_a_one_line_error_names_a_config_file_that_fails(tmp_path, source, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("broken.py")
    file.write_text(source)
    with pytest.raises(InputError, match=message) as error:
        load(file)
    assert str(error.value).startswith(f"{file}:")
    assert "\n" not in str(error.value)
