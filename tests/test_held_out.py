"""A validation split that holds out a share of each class by the ids of examples. It is the same on every machine, and
changes little when examples are added."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.forms import refusal

import jaxddp
from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.division import GROUPS, folds, grouped, held_out_rows, write_folds
from jaxddp.data.division import held_out as divide_table
from jaxddp.data.opening import RunData, few_labels, open_evaluated, open_one_split, open_splits
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

SHARES = st.floats(0.001, 0.999)
EXAMPLES = st.dictionaries(st.text("abcdé/7 ", min_size=1, max_size=6), st.integers(0, 3), min_size=1, max_size=40)


def columns(examples: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([name.encode() for name in examples], "S"), np.array([*examples.values()], np.int32)


def held_out(examples: dict[str, int], share: float) -> set[str]:
    names, labels = columns(examples)
    return {name.decode() for name in names[held_out_rows(names, labels, share)].tolist()}


def without_single_examples(examples: dict[str, int]) -> dict[str, int]:
    """Return the examples of classes with at least two examples. A class with a single example is an error."""
    labels = [*examples.values()]
    return {name: label for name, label in examples.items() if labels.count(label) > 1}


@given(EXAMPLES, SHARES)
def test_each_class_gives_its_share_rounded_and_keeps_at_least_one_example(examples: dict[str, int], share: float):
    examples = without_single_examples(examples)
    chosen = held_out(examples, share)
    for label in {*examples.values()}:
        names = {name for name, other in examples.items() if other == label}
        count = len(names & chosen)
        assert 1 <= count <= len(names) - 1
        assert abs(count - share * len(names)) <= 0.5 or count in (1, len(names) - 1)


@given(EXAMPLES, SHARES)
def test_an_additional_example_moves_at_most_one_other_of_its_class(examples: dict[str, int], share: float):
    examples = without_single_examples(examples)
    for label in (0, 1):
        without, with_new = held_out(examples, share), held_out(examples | {"new": label}, share)
        changed = (without ^ with_new) - {"new"}
        if [*examples.values()].count(label) > 1:
            assert len(changed) <= 1 and all(examples[name] == label for name in changed)


def test_the_choice_of_held_out_examples_is_pinned():
    """Another hash or byte order would change the validation splits of old runs."""
    examples = {f"cat/{number}": 0 for number in range(10)} | {f"dog/{number}": 1 for number in range(5)}
    assert held_out(examples, 0.3) == {"cat/1", "cat/7", "cat/9", "dog/3", "dog/4"}


def write(root: Path, *names: str) -> Path:
    for value, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(root / name)
    return root


NAMES = [f"{label}/{number}.png" for label in ("ant", "bee") for number in range(6)]


def ids(table) -> list[str]:
    return [example_id.decode() for example_id in table.id.tolist()]


def test_data_that_cannot_be_divided_raise_a_one_line_error(tmp_path: Path):
    root = write(tmp_path / "set", *NAMES)
    fault = f"{root}: has no validation split; give data.val_share, such as 0.1 to hold out a tenth of each class"
    assert refusal(DataConfig(path=str(root))) == fault
    write(root, "cow/only.png")
    message = refusal(DataConfig(path=str(root), val_share=0.1))
    assert message.startswith(f"{root}: class 'cow' has only one example, {root}/cow/only.png, but data.val_share=0.1 ")
    for fold in ("3/3", "0/1", "1", "-1/3", "0/x"):
        with pytest.raises(InputError, match="data.fold='.*': expected a fold and the number of folds, 0/5 to 4/5"):
            DataConfig(fold=fold)
    with pytest.raises(InputError, match="data.fold='0/3': takes the place of data.val_share; give one"):
        DataConfig(fold="0/3", val_share=0.1)
    root = write(tmp_path / "train", "car/1.png", "train/steam/1.png", "train/steam/2.png")
    assert refusal(DataConfig(path=str(root), val_share=0.3)) == (
        f"{root / 'car'}: images beside train/, which is taken for the training split; move them into a class folder "
        "there, or call train/ something else if it is a class"
    )


def test_a_folder_of_classes_is_divided_for_validation(tmp_path: Path):
    root = write(tmp_path / "set", *NAMES)
    splits = open_splits(DataConfig(path=str(root), val_share=0.3))
    train, val = splits["train"], splits["val"]
    assert (len(train), len(val)) == (8, 4)
    # Moved data keep their split; of other data, the validation split or all images are measured.
    for names, count in ((NAMES, 4), (NAMES[4:], 8), (["val/ant/1.png", "val/bee/2.png"], 2)):
        other = DataConfig(path=str(write(tmp_path / str(count), *names)), val_share=0.3)
        assert len(open_evaluated(other, None, RunData([val.fingerprint], True))[1]) == count
    bees = DataConfig(path=str(write(tmp_path / "bees", "bee/1.png")), val_share=0.3)
    of_run = None, RunData([val.fingerprint], True), (("ant", "bee"),) * 2
    assert open_evaluated(bees, *of_run)[1].labels.tolist() == [1]
    # A network for several labels is measured so, even if each image of the other data has one.
    assert open_evaluated(bees, *of_run, "several labels")[1].labels.tolist() == [[0, 1]]
    few = DataConfig(path=str(tmp_path / "4"), val_share=0.3, labels_per_class=2)
    assert ids(open_evaluated(few, None, RunData([few_labels(train, 2).fingerprint], True))[1]) == ids(val)
    assert sorted(ids(train) + ids(val)) == sorted(name.removesuffix(".png") for name in NAMES)
    assert ids(train) == sorted(ids(train)) and ids(val) == sorted(ids(val))
    assert train.class_ids == val.class_ids == ("ant", "bee") and val.labels.tolist() == [0, 0, 1, 1]
    parts = [open_splits(DataConfig(path=str(root), fold=f"{number}/3")) for number in range(3)]
    assert all(sorted(ids(part["train"]) + ids(part["val"])) == sorted(ids(train) + ids(val)) for part in parts)
    assert sorted(name for part in parts for name in ids(part["val"])) == sorted(ids(train) + ids(val))


def with_groups(groups: list[int], labels: list[int]) -> Any:
    ids = np.array([f"{row}".encode() for row in range(len(groups))])
    names = np.array([f"patient {group}".encode() for group in groups])
    return ExampleTable(LocalFiles(Path("/")), ids, ids, np.array(labels, np.int32), tuple("abc"), group=names)


ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=2, max_size=60)


@given(ROWS, SHARES, st.randoms(use_true_random=False))
def test_a_group_is_on_one_side_in_any_order_of_the_rows(rows: list[tuple[int, int]], share: float, random):
    table = with_groups(*map(list, zip(*rows, strict=True)))
    if len({group for group, _ in rows}) < 2:
        with pytest.raises(InputError, match="all images are of one group, 'patient"):
            divide_table(table, share, "set")
        return
    train, val = divide_table(table, share, "set").values()
    assert len(train) and len(val) and not np.intersect1d(train.group, val.group).size
    order = [*range(len(rows))]
    random.shuffle(order)
    assert {*divide_table(table.rows(np.array(order)), share, "set")["val"].id.tolist()} == {*val.id.tolist()}
    fold = folds(table, 2)
    assert all(len({*fold[table.group == group]}) == 1 for group in np.unique(table.group)) and {*fold} == {0, 1}


def test_groups_and_folds_keep_the_shares_of_the_classes(caplog):
    groups = np.arange(600) % 100
    table = with_groups(groups.tolist(), (groups % 3).tolist())
    np.testing.assert_allclose(np.bincount(divide_table(table, 0.2, "set")["val"].labels), 40, atol=6)
    for of_table in (table, dataclasses.replace(table, group=None)):
        counts = [np.bincount(of_table.labels[folds(of_table, 5) == fold]) for fold in range(5)]
        np.testing.assert_allclose(counts, 40, atol=6)
    labels = np.array([[1, 1]] * 3 + [[0, 1], [1, 0], [1, 1]], np.uint8)
    table = dataclasses.replace(with_groups([*range(6)], [0] * 6), labels=labels)
    assert divide_table(table, 0.5, "set")["val"].labels.tolist() == [[1, 1], [1, 0]] and not caplog.text


def test_folds_are_a_table_that_opens_and_a_group_in_both_splits_is_an_error(tmp_path: Path, monkeypatch, capfd):
    root = write(tmp_path / "set", *NAMES)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "check", "set"]) == 0 and "all: 12 examples (12 png), 0 cannot" in capfd.readouterr().out
    assert main(["data", "split", f"../{tmp_path.name}/set", "--folds", "3"]) == 0
    assert capfd.readouterr().out.startswith("fold 0: 4 images\nfold 1: 4 images\n")
    keys: dict[str, Any] = {"path": "set.folds.csv", "split_column": "fold"}
    for fold in "012":
        train, val = open_splits(DataConfig(**keys, val_fold=fold)).values()
        assert sorted(ids(train) + ids(val)) == [f"set/{name}" for name in NAMES] and val.class_names == ("ant", "bee")
        assert np.bincount(val.labels).tolist() == [2, 2] and val.name(0).startswith(str(root))
    text = Path("set.folds.csv").read_text().replace("0.png", "0.png,p").replace("path,label", "path,patient,breed")
    Path("b.csv").write_text(re.sub(r"([1-9]).png", r"\1.png,p\1", text).replace("p,", "p1,"))
    assert main(["data", "split", "b.csv", "--group-column", "patient", "--folds", "3", "--out", "set/c.csv"]) == 0
    assert Path("set/c.csv").read_text().startswith("path,label,patient,fold\nant/0.png,ant,p1,")
    for words in ("split b.csv --group-column patient --folds 9", "check b.csv --split-column n", "check no"):
        assert main(["data", *words.split()]) == 2
    assert re.search(r"9 folds of 5 groups; give at(.|\n)* --split-column: .*\n.*check PATH$", capfd.readouterr().err)
    train, val = jaxddp.open_data("b.csv", 0.5, group_column="patient")
    folds = [jaxddp.open_data("b.csv", fold=f"{fold}/2", group_column="patient")[1] for fold in range(2)]
    assert (len(train), len(val), sum(map(len, folds))) == (6, 6, 12)
    with pytest.raises(InputError, match="open_data: unknown argument 'val_shar'; did you mean 'val_share'"):
        jaxddp.open_data("b.csv", val_shar=0.5)
    with pytest.raises(InputError, match=r"data split: /1 has no label \(1 of 2 images have none\)"):
        write_folds(with_groups([0, 1], [0, -1]), 2, Path("c.csv"), DataConfig())
    keys |= {"group_column": "patient", "path": "b.csv", "val_fold": "1"}
    assert "b.csv: 3 groups (p1, p4, p5) with images in both splits; divide" in refusal(DataConfig(**keys))


def test_a_function_of_the_path_groups_images_of_any_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = write(tmp_path / "set", *NAMES)
    monkeypatch.setitem(GROUPS, "pair", lambda path: int(path[4]) // 2)
    train, val = open_splits(data := DataConfig(path=str(root), val_share=0.4, group_column="pair")).values()
    assert not {name[4] for name in ids(train)} & {name[4] for name in ids(val)} and len(val) == 4
    assert ids(open_one_split([str(root)], data)) == ids(val)
    in_shard = dataclasses.replace(train, path=np.full(len(train), b"s.tar"), offset=np.arange(len(train)), group=None)
    assert (grouped(in_shard, "pair").group == train.group).all()
    with pytest.raises(InputError, match="a table of folds names files; train on each fold with --data.fold 0/2"):
        write_folds(in_shard, 2, Path("c.csv"), DataConfig())
    monkeypatch.setitem(GROUPS, "pair", lambda path: path[40])
    assert re.fullmatch(r"GROUPS\['pair'\]: .*IndexError: string index out of range", refusal(data))
    assert refusal(dataclasses.replace(data, group_column="other")).endswith("folders; leave data.group_column out")
