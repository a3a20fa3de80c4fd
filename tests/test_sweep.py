"""`jaxddp sweep`: the values of a key, the trials and their names, and mistakes on the command line."""

import math
import re
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import fails

from jaxddp.cli import main
from jaxddp.command_line.words import options_of
from jaxddp.commands.sweep import _split, _trials
from jaxddp.commands.train import Train
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Range
from jaxddp.sweeps.folder import SweepFolder, folds_of
from jaxddp.sweeps.queues import GridQueue
from jaxddp.sweeps.trials import Choices, Interval, Template, Trial, is_split, short_names, space_of, trial_name
from jaxddp.workdir.lock import locked

Whole: Any = Annotated[int, Range(0, 100)]
Number: Any = Annotated[float, Range(0, 10)]


@pytest.mark.parametrize(
    ("hint", "text", "space"),
    [
        (Number, "1,3", Choices(("1", "3"))),
        (Number | None, "1e-3, 3e-3", Choices(("1e-3", "3e-3"))),
        (Number, "0:3", None),
        (Whole, "2:5", Choices(("2", "3", "4"))),
        (bool, "true,false", Choices(("true", "false"))),
        (Literal["a", "b"], "a,b", Choices(("a", "b"))),
        (Duration, "1 epoch,2 epochs", Choices(("1 epoch", "2 epochs"))),
        (str, "conv1,layer1", None),
        (tuple[str, ...], "jsonl,curves", None),
        (Number, "0.1..1", Interval(0.1, 1)),
        (Number, "1e-4..1e-1:log", Interval(1e-4, 1e-1, log=True)),
        (Whole | None, "8..64", Interval(8, 64, whole=True)),
    ],
)
def test_the_type_of_a_key_decides_which_texts_have_several_values(hint, text, space):
    assert space_of("some.key", hint, [text]) == space


def test_a_text_that_may_contain_commas_has_one_value_for_each_option():
    assert space_of("model.freeze", str | None, ["conv1", "conv1,layer1"]) == Choices(("conv1", "conv1,layer1"))
    # The last option counts for other keys, as in `jaxddp train`.
    assert space_of("seed", Whole, ["0,1", "2"]) is None
    assert space_of("model.name", str, ["resnet18", "resnet18,resnet34"]) == Choices(("resnet18", "resnet34"))


def test_keys_whose_values_contain_commas_are_not_split():
    keys = options_of(Train)
    for key in ("model.freeze", "loss.class_weights", "parallel.shares", "log.to", "data.augment.policy"):
        assert is_split(key, keys[key]) == (key == "data.augment.policy")


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        *((Number, text) for text in ("1..x", "2..1", "1..1", "0..1:log", "-1..1", "1..11", "1,,2")),
        *((Whole, text) for text in ("3:3", "0:100000", "1.5..2")),
    ],
)
def test_wrong_lists_intervals_and_ranges_are_reported_with_their_key(hint, text):
    with pytest.raises(InputError, match=r"^some\.key"):
        space_of("some.key", hint, [text])


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_word_of_an_interval_is_within_it(first, second, position):
    low, high = sorted((first, second))
    interval = Interval(low, high)
    assert interval.word(low + position * (high - low)) in interval


words = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1, max_size=6)
lists = st.lists(words, min_size=1, max_size=4, unique=True)


@given(st.dictionaries(st.sampled_from(["seed", "optimizer.learning_rate", "model.name", "a.b"]), lists, min_size=1))
def test_a_grid_has_every_combination_once_and_each_has_its_own_name(values):
    keys = list(values)
    template = Template(
        "digits",
        {"fixed": ("--fixed", "1"), **{key: (f"--{key}",) for key in keys}},
        {key: Choices(tuple(texts)) for key, texts in values.items()},
    )
    grid = [*template.grid()]
    number = math.prod(map(len, values.values()))
    assert len(grid) == len({tuple(trial.items()) for trial in grid}) == number
    names = [trial_name(trial) for trial in grid]
    assert len({*names}) == number
    assert all(re.fullmatch(r"[A-Za-z0-9._+=-]{1,200}", name) and name[0].isalpha() for name in names)
    for trial in grid:
        expected = [word for key in keys for word in (f"--{key}", trial[key])]
        assert template.words(trial) == ["digits", "--fixed", "1", *expected]


texts = st.text("a/_ -5.epochs=", max_size=60)


@given(texts, texts)
def test_different_texts_have_different_names(first, second):
    assert (trial_name({"data.path": first}) == trial_name({"data.path": second})) == (first == second)


def test_names_show_the_values_of_the_config():
    values = {"optimizer.learning_rate": 1e-3, "model.name": "resnet18", "train.duration": "5 epochs", "seed": 2}
    assert trial_name(values) == "learning_rate=0.001__model=resnet18__duration=5-epochs__seed=2"
    assert re.fullmatch(r"weights=a-b\.npz-[0-9a-f]{8}", trial_name({"model.weights": "a/b.npz"}))
    assert len(trial_name({f"some.long_name_{number}": 1.5 for number in range(50)})) < 200
    assert [*short_names(keys := ["train.batch_size", "eval.batch_size"]).values()] == keys


def words_of(*arguments: str) -> list[list[str]]:
    """Return the words of the trials of a grid after the config."""
    _, template = _split("digits", arguments)
    return [template.words(values)[1:] for values in template.grid()]


def test_a_trial_has_the_words_of_the_user_with_one_value_for_each_option():
    assert words_of("--lr", "1e-3,3e-3", "--log.to", "jsonl,curves", "--seed=0:2", "--jobs", "2") == [
        ["--lr", rate, "--log.to", "jsonl,curves", f"--seed={seed}"] for rate in ("1e-3", "3e-3") for seed in (0, 1)
    ]
    assert words_of("--model.freeze", "a", "--train.ema-warmup", "true,false", "--model.freeze", "a,b") == [
        ["--model.freeze", freeze, "--train.ema-warmup", on] for freeze in ("a", "a,b") for on in ("true", "false")
    ]


def test_the_commands_of_the_trials_are_listed(capfd, tmp_path):
    folder = str(tmp_path / "my sweep")
    command = ["sweep", "digits", "--epochs", "1,2", "--folds", "2", "--data", "d", "--workdir", folder, "--list"]
    assert main(command) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"jaxddp train digits --epochs {count} --data d --data.fold {fold}/2 --workdir "
        f"'{folder}/duration={count}-epoch{'s' * (count > 1)}__fold={fold}-of-2'"
        for count in (1, 2)
        for fold in (0, 1)
    ]
    assert not (tmp_path / "my sweep").exists()


SEARCH = ["--search", "optuna", "--trials", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "1e-3"], "sweep: no option has several values; give some, such as --lr 1e-3,3e-3 or --seed 0:3"),
        (["--lr", "1,0.1", "--optimizer.foo", "3"], "Unrecognized options: --optimizer.foo"),
        (["--lr", "1e-3,0.001"], "--lr: 1e-3 and 0.001 are the same value; give each value once"),
        (["--seed", "0:2", "--lr", "1,1"], "--lr: 1 and 1 are the same value"),
        (["--lr", "1,,2"], "--lr 1,,2: a value of the list is empty; give a,b,c"),
        (["--lr", "0.1..1"], "--lr: an interval A..B needs --search optuna; a grid has a,b,c, or A:B for whole"),
        (["--seed", "0:9999", "--lr", "1,2"], "the grid has 19,998 trials; a sweep has at most 10,000"),
        (["--seed", "0:2", "--resume", "never"], "--resume: a sweep always resumes its trials; leave it out"),
        (["--checkpoint.best", "val loss", "--checkpoint.best", "val top1"], "--checkpoint.best: the trials of a"),
        (["--folds", "2", *SEARCH], "--search: compares trials, and folds belong together; leave --search or the"),
        (["--seed", "0:2", "--log.to", "tensorboard"], "--log.to tensorboard: the sweep reads the files of jsonl"),
        (["--seed", "0:2", "--prune"], "--prune: has no effect without --search optuna"),
        (["--seed", "0:2", "--search", "optuna"], "--search: give the number of trials with --trials N"),
        (["--seed", "0:2", "--list", *SEARCH], "--search: suggests the trials one after another; leave --list and"),
        (["--seed", "0:2", "--index", "2"], "--index 2: the sweep has 2 trials, from 0"),
        (["--train.label-smoothing", "0..1", *SEARCH], "--train.label-smoothing 1.0: expected at least 0, below 1"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(arguments, message, capfd, tmp_path):
    folder = tmp_path / "sweep"
    assert fails(["sweep", "digits", *arguments, "--workdir", str(folder)], capfd).startswith(f"jaxddp: {message}")
    assert not folder.exists()


def test_another_config_in_the_folder_is_refused(capfd, tmp_path):
    (tmp_path / "sweep.json").write_text('{"version": 1, "config": "cifar10", "trials": []}')
    message = f"jaxddp: {tmp_path}/sweep.json: is a sweep of cifar10, not of digits; give another --workdir"
    assert fails(["sweep", "digits", "--seed", "0:2", "--workdir", str(tmp_path)], capfd) == message


def test_a_trial_is_not_finished_after_its_recipe_was_edited(tmp_path):
    recipe, result = tmp_path / "my.py", tmp_path / "batch_size=8" / "result.json"
    template = Template(str(recipe), {"train.batch_size": ("--batch-size",)}, {"train.batch_size": Choices(("8",))})
    source = "from jaxddp.config import Config\nget_config = lambda: Config(seed={})\nget_loss = lambda config: {}\n"
    result.parent.mkdir()
    result.write_text('{"status": "done"}')
    for seed, loss, unfinished in ((0, 1, 1), (0, 1, 0), (0, 2, 1), (1, 2, 1)):
        recipe.write_text(source.format(seed, loss))
        queue = GridQueue(SweepFolder(tmp_path, f"/moved/{seed}/my.py"), _trials(template, tmp_path))
        assert len(queue.unfinished()) == unfinished
        if (trial := queue.next()) is not None:
            queue.record_end(trial, "done")


def test_a_damaged_file_and_a_run_in_its_place_are_refused(capfd, tmp_path):
    command = ["sweep", "digits", "--seed", "0:2", "--workdir", str(tmp_path)]
    trials = ['{"name": 3, "values": {"seed": "0"}, "words": ["x"]}', '{"name": "a", "values": [], "words": ["x"]}']
    trials += ['{"name": "a", "values": {"seed": 1}, "words": ["digits"]}', "3"]
    trials += ['{"name": "a", "values": {"seed": "1"}, "words": ["x"], "ended": "late"}']
    trials += ['{"name": "../a", "values": {"seed": "1"}, "words": ["x"]}']
    wholes = [f'{{"version": 1, "config": "digits", "trials": [{trial}]}}' for trial in trials]
    for content in ("{}", "[]", '{"config": 3, "trials": []}', "[" * 500_000, *wholes):
        (tmp_path / "sweep.json").write_text(content)
        assert f"{tmp_path}/sweep.json: is not the file of a sweep" in fails(command, capfd)
    (tmp_path / "metrics.jsonl").touch()
    assert f"{tmp_path}: is the work directory of a run; give another --workdir" in fails(command, capfd)
    (tmp_path / "link").symlink_to("gone")
    assert f"{tmp_path}/link: cannot be written (File exists)" in fails([*command[:-1], f"{tmp_path}/link"], capfd)


def test_a_trial_of_a_job_array_is_in_the_folder_before_it_is_trained(capfd, tmp_path):
    fails(["sweep", "digits", "--data", "x", "--seed", "0:2", "--workdir", str(tmp_path), "--index", "1"], capfd)
    assert "seed=1 of its 1 run not finished" in fails(["predict", str(tmp_path), "x", "--out", "y.csv"], capfd)
    (run := tmp_path / "seed=1").mkdir()
    (run / "metrics.jsonl").touch()
    with locked(run):
        assert main(["sweep", "digits", "--data", "x", "--seed", "1:2", "--workdir", str(tmp_path)]) == 0
    assert "not finished: seed=1 (running); the same command continues" in capfd.readouterr().err


def test_a_trial_without_a_fold_is_in_no_set_of_folds():
    trials = [Trial(fold, {"data.fold": fold}, []) for fold in ("None", "1/2", "0/2")]
    assert folds_of(trials) == {"": [trials[2], trials[1]]} and not folds_of([Trial("a", {"data.fold": "a"}, [])])
    trials = [Trial(fold, {"data.val_fold": fold, "seed": "1"}, []) for fold in ("b", "a")]
    assert folds_of(trials) == {"-seed=1": trials}
