"""Reads the features and the labels of a file of `jaxddp features`."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.data.formats.array_files import as_input_errors
from jaxddp.data.formats.numpy_files import array_names, unpack_array
from jaxddp.inference.features.feature_formats import format_of, parquet_library

_ADVICE = "give a file that `jaxddp features` wrote"


@dataclass(frozen=True)
class LabelledFeatures:
    """The features of N labelled images of K classes. Images that cannot be used are left out.

    Attributes:
        path: the file.
        features: float32[N, D].
        labels: int64[N].
        omitted: the number of images that are left out, because they have no finite features or no label.
        network: the network and the layer.
    """

    path: Path
    features: np.ndarray
    labels: np.ndarray
    class_ids: tuple[str, ...]
    omitted: int
    network: tuple[str, str]


def read_features(path: Path) -> LabelledFeatures:
    """Read a .npz or .parquet file of `jaxddp features`.

    Raises:
        InputError: the file cannot be read, is no such file, or its images have no label or several.
    """
    with files.reading(path, _ADVICE, missing=f"no such file; {_ADVICE}"), files.open_regular(path) as file:
        arrays = (_read_npz if format_of(path) == "npz" else _read_parquet)(path, file)
    if "labels" not in arrays:
        raise InputError(f"{path}: its images have no labels, which a probe needs; compute the features of a data set")
    features, labels = arrays["features"], arrays["labels"]
    if labels.ndim > 1:
        raise InputError(f"{path}: its images may have several labels, and a probe takes one")
    features = features.reshape(len(features), -1)
    usable = np.isfinite(features).all(1) & (labels >= 0)
    if not usable.any():
        raise InputError(f"{path}: has no image with features and a label; {_ADVICE}")
    network = str(arrays["network"]), str(arrays["layer"])
    class_ids = tuple(map(str, arrays["class_ids"]))
    omitted = int((~usable).sum())
    return LabelledFeatures(path, features[usable], labels[usable].astype(np.int64), class_ids, omitted, network)


def check_comparable(train: LabelledFeatures, val: LabelledFeatures) -> None:
    """Raise `InputError` if two files have features of different networks or layers, or other classes."""
    for of_train, of_val, kind in (
        (train.network[0], val.network[0], "network"),
        (train.network[1] or "the default", val.network[1] or "the default", "layer"),
        (f"{train.features.shape[1]} features", f"{val.features.shape[1]} features", "size"),
    ):
        if of_train != of_val:
            raise InputError(
                f"{val.path}: is of another {kind} than {train.path}: {of_val}, not {of_train}; compute both files "
                "with the same network and --layer"
            )
    if train.class_ids != val.class_ids:
        raise InputError(f"{val.path}: has other classes than {train.path}; give two splits of one data set")


def _read_npz(path: Path, file: Any) -> dict[str, Any]:
    if not zipfile.is_zipfile(file):
        raise InputError(f"{path}: is no feature file; {_ADVICE}")
    with as_input_errors(path, _ADVICE):
        names = [name for name in array_names(path) if name not in ("ids", "errors")]
        arrays = {name: unpack_array(path, name) for name in names}
    _check_names(path, arrays)
    return arrays


def _read_parquet(path: Path, file: Any) -> dict[str, Any]:
    pyarrow, parquet = parquet_library()
    try:
        table = parquet.read_table(file)
        arrays: dict[str, Any] = files.parse_json((table.schema.metadata or {}).get(b"jaxddp", b"{}"), dict)
        if "features" in table.column_names:
            values = table["features"].combine_chunks()
            arrays["features"] = np.asarray(values.flatten(), np.float32).reshape(len(table), -1)
        if "label" in table.column_names:
            arrays["labels"] = np.array(table["label"].to_pylist())
    except (pyarrow.ArrowInvalid, ValueError) as error:
        raise InputError(f"{path}: is no feature file ({error}); {_ADVICE}") from None
    _check_names(path, arrays)
    return arrays


def _check_names(path: Path, arrays: dict[str, Any]) -> None:
    names = ("features", "layer", "network", *(("class_ids",) if "labels" in arrays else ()))
    if missing := [name for name in names if name not in arrays]:
        raise InputError(f"{path}: is no feature file: it has no {missing[0]}; {_ADVICE}")
