"""Trains a ResNet on ImageNet with jaxddp's Python API, with one process for each GPU.

    python launch/main.py --data /data/imagenet --epochs 90            # all GPUs of this machine
    python launch/main.py --data /data/imagenet --epochs 90 --nodes 2 --gpus 8 --nr 0 --coordinator host0:12321
    python launch/main.py --data /data/imagenet --epochs 90 --nodes 2 --gpus 8 --nr 1 --coordinator host0:12321

The last two commands run on two machines, which share the work directory. Without GPUs, set the number of processes:

    jaxddp data sample digits --out data/digits
    python launch/main.py --data data/digits --gpus 0 --processes 2 --model resnet18 --width 8 --image-size 32

If srun, mpirun, torchrun or `jaxddp launch -- python launch/main.py …` starts the script, it joins their job
instead of starting processes. If you repeat a command, the run resumes from its last checkpoint.
"""

import argparse
import os
import sys
from pathlib import Path

import optax

import jaxddp
from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch
from jaxddp.core.errors import JaxddpError, with_notes
from jaxddp.job.environment import find_job
from jaxddp.job.membership import abandon
from jaxddp.kernels import BY_NAME


def train(args: argparse.Namespace) -> None:
    """Train the network. Every process trains on its slice of each batch."""
    # Tables of examples, from the *_solution.csv files.
    table = jaxddp.train_solutions(args.data, classes=args.classes)
    val = jaxddp.val_solutions(args.data, classes=args.classes)
    # The ImageNet stem halves the resolution twice before the first block, which is too much for small images.
    stem = "imagenet" if args.image_size > 64 else "small"
    model = jaxddp.resnet(args.model, table.num_classes, width=args.width, stem=stem, dtype=args.precision)
    data = jaxddp.DataConfig(image_size=args.image_size, resize=args.image_size * 8 // 7)
    # This call joins the job, so JAX's devices must not be used before it.
    setup = jaxddp.prepare_training(
        model,
        table,
        None,
        make_optimizer(args.learning_rate),
        args.batch_size,
        epochs=args.epochs,
        data=data,
        seed=args.seed,
        precision=args.precision,
    )
    if setup.topology.peers.is_first:
        print(setup)
    steps = setup.layout.plan.total_steps
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 20, steps)
    _, history = jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=val, schedule=schedule, workdir=args.workdir, log_every=args.log_every
    )
    if setup.topology.peers.is_first:
        print(f"validation top-1: {history.val['top1'][-1]:.4f}")


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum, and weight decay for kernels only."""
    return optax.chain(
        optax.add_decayed_weights(1e-4, mask=BY_NAME.mask),
        optax.sgd(learning_rate, momentum=0.9, nesterov=True),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    start = parser.add_argument_group("processes")
    start.add_argument("-n", "--nodes", type=int, default=1, help="number of machines in the job")
    start.add_argument(
        "-g", "--gpus", type=int, help="GPUs of each machine, with one process for each GPU (default: all; 0: CPU)"
    )
    start.add_argument("-nr", "--nr", type=int, help="this machine's number, from 0")
    start.add_argument("--processes", type=int, help="processes on each machine (default: one for each GPU)")
    start.add_argument("--coordinator", metavar="HOST:PORT", help="address of machine 0, for several machines")
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--data", type=Path, required=True, help="the unpacked ILSVRC archive")
    recipe.add_argument("--classes", help="a subset of the classes, such as 0:100")
    recipe.add_argument("--workdir", type=Path, default=Path("runs/main"), help="for checkpoints, metrics and logs")
    recipe.add_argument("--epochs", type=float, default=2)
    recipe.add_argument("--batch-size", type=int, default=32, help="batch size of each device")
    recipe.add_argument("--model", default="resnet50")
    recipe.add_argument("--width", type=int, default=64, help="channels of the first stage")
    recipe.add_argument("--image-size", type=int, default=224)
    recipe.add_argument("--learning-rate", type=float, default=0.1)
    recipe.add_argument("--precision", default="float32", help="or bfloat16; or float16, with loss scaling")
    recipe.add_argument("--seed", type=int, default=0)
    recipe.add_argument("--log-every", default="10 steps")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        # The only process of a launcher also trains, although it has no job to join.
        if "JAX_PROCESS_ID" in os.environ or find_job():
            train(args)
            return 0
        options = Launch(
            processes=args.processes,
            gpus=args.gpus,
            nodes=str(args.nodes),
            nr=args.nr,
            coordinator=args.coordinator,
            logs=args.workdir / "logs",
        )
        return launch(options, [sys.executable, *sys.argv])
    except JaxddpError as error:
        line = with_notes(str(error), error)
        # Ends the other processes of the job with this reason.
        abandon(line, error.exit_code)
        print(f"main.py: {line}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
