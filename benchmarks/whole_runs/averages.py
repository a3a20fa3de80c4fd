"""Measures averaged parameters with the batch statistics of the trained parameters, and with their own.

    jaxddp data sample digits --out data/digits
    python benchmarks/whole_runs/averages.py data/digits [--seeds 5] [--out FILE.json]

A ResNet-10 of width 8 is trained for 4 epochs with a constant learning rate of 0.1, once with `ema=0.99` without its
warmup and once with `swa="25%"`.
"""

import argparse
import json
import sys
from pathlib import Path

import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxddp
from benchmarks.common.harness import machine
from jaxddp.losses import softmax_cross_entropy
from jaxddp.reports.tables import Estimate

AVERAGES = {"ema": {"ema": 0.99, "ema_warmup": False}, "swa": {"swa": "25%"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/averages.json"))
    options = parser.parse_args()
    train, val = jaxddp.open_data(options.data)
    data, found = jaxddp.DataConfig(image_size=32, resize=32, crop="whole"), {}
    for name, words in AVERAGES.items():
        model = jaxddp.resnet("resnet10", train.num_classes, width=8, stem="small")
        optimizer = optax.sgd(0.1, momentum=0.9)
        prepared = jaxddp.prepare_training(model, train, 1, optimizer, 32, epochs=4, data=data, **words)
        rows = found[name] = []
        for seed in range(options.seeds):
            setup = prepared.with_seed(seed)
            state, history = jaxddp.train(softmax_cross_entropy, setup, val=val, listeners=())
            # Statistics of another step are not used.
            states = {"own": state, "those of the trained parameters": state.replace(step=state.step - 1)}
            measured = {key: jaxddp.evaluate(each, setup, val)["top1"] for key, each in states.items()}
            rows.append({**measured, "trained parameters": float(history.val["top1"][-1])})
        for key in rows[0]:
            print(f"{name}, {key}: top-1 {Estimate.of('top1', [row[key] for row in rows])}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"command": sys.argv, **machine(), "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
