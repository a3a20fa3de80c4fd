"""A process of `soak.py --door python`: trains by `jaxddp.train` with the default loggers of a config."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxddp

sys.path.append(str(Path(__file__).parents[2] / "tests" / "recipes"))
from small_recipe import SmallNet  # pyright: ignore[reportMissingImports]: the line above

BATCH, LOGGERS = 8, ("curves", "parameters", "tensorboard")


def main(data: str, workdir: str, steps: str, every: str) -> None:
    arrays, often = np.load(data), json.loads(every)
    train, val = (
        jaxddp.ArrayTable(arrays[f"{split}_images"], arrays[f"{split}_labels"], tuple("abcde"))
        for split in ("train", "val")
    )
    net, processes = SmallNet(batch_norm=True, sync="data"), int(os.environ["JAX_NUM_PROCESSES"])
    epochs = int(steps) * BATCH / len(train.labels)
    setup = jaxddp.prepare_training(net, train, None, optax.sgd(0.02), BATCH // processes, epochs=epochs)
    cadences = {f"{name}_every": duration for name, duration in often.items()}
    jaxddp.train(jaxddp.softmax_cross_entropy, setup, val=val, workdir=workdir, log_to=LOGGERS, **cadences)


if __name__ == "__main__":
    main(*sys.argv[1:])
