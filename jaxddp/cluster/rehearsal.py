"""The first moments of a config's run, one after the other: its data, a few of its images, its compiled step."""

import time
from itertools import islice
from typing import Any

import jax
import numpy as np

from jaxddp.cluster.checks import Finding, device_memory
from jaxddp.config import Config
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.data.opening import Table, open_tables
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.engine.objective import cross_entropy
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import make_train_step
from jaxddp.errors import InputError
from jaxddp.experiment.batches import image_shape, make_substitutes
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.setup import RunSetup
from jaxddp.measure.cost import compile_with_cost
from jaxddp.wording import size

SAMPLE_IMAGES = 512
_SAMPLE_BATCH = 16


def data(config: Config) -> Finding:
    """Open the data and see that every image is there; the value is the two tables."""
    tables = train_table, val_table = open_tables(config.data)
    counts = f"{len(train_table):,} rows to train, {len(val_table):,} to validate"
    return Finding(f"{counts}, {train_table.num_classes} classes; every image is there", tables)


def images(config: Config, tables: tuple[Table, Table], process: int) -> Finding:
    """Decode some of the images that training begins with, others in each process, and the first of validation."""
    train_table, val_table = tables
    if isinstance(train_table, ArrayTable) or isinstance(val_table, ArrayTable):
        return Finding("in memory, nothing to decode")
    # TensorFlow takes seconds to import, and a machine without it can still be looked at.
    from jaxddp.data.images.windows import Crop
    from jaxddp.data.stream import image_batches, image_eval_batches

    size = min(_SAMPLE_BATCH, len(train_table))
    steps = -(-min(SAMPLE_IMAGES, len(train_table)) // size)
    span: dict[str, Any] = {"start": process * steps, "stop": (process + 1) * steps}
    crop = Crop(config.data.crop, config.data.crop_area)
    order = SampleOrder(len(train_table), size, config.seed)
    span["substitutes"] = make_substitutes(train_table, config.data)
    stream = image_batches(train_table, order, crop, **span, seed=config.seed, image_size=config.data.image_size)
    # The clock starts at the first batch, when TensorFlow has built its graph and started its threads.
    decoded, begin = len(next(stream).row), time.perf_counter()
    timed = sum(len(batch.row) for batch in stream)
    speed = f" at {timed / (time.perf_counter() - begin):,.0f} images/s" if timed else ""
    evaluation = image_eval_batches(
        val_table,
        EvalOrder(len(val_table), _SAMPLE_BATCH),
        image_size=config.data.image_size,
        resize=config.data.resize,
    )
    validated = int(sum(batch.mask.sum() for batch in islice(evaluation, steps)))
    evaluation.close()
    return Finding(f"{decoded + timed} decoded for training{speed}, {validated} for validation")


def recipe(config: Config) -> Finding:
    """Put the run together, as training does; the value is its setup."""
    made = Recipe.of(config)
    steps = f"{made.plan.total_steps:,} steps of {made.order.batch_size} images"
    setup = made.setup()
    count = sum(leaf.size for leaf in jax.tree.leaves(setup.state.params))
    return Finding(f"{config.model.name}, {count:,} parameters; {steps}", setup)


def step(config: Config, setup: RunSetup) -> Finding:
    """Compile the training step and see what it takes.

    Raises:
        InputError: a device has not as much memory.
    """
    objective = setup.objective(cross_entropy(config.train.label_smoothing))
    made: Any = make_train_step(objective, setup.optimizer, setup.topology, compiler_options=setup.compiler_options)
    begin = time.perf_counter()
    _, cost = compile_with_cost(made, setup.state, abstract_batch(setup))
    work = f"{cost.flops / 1e9:.3g} GFLOP a step; compiled in {time.perf_counter() - begin:.0f} s"
    memory, limit = cost.memory, device_memory(setup.topology)
    if memory is None:
        return Finding(f"{work}; the backend does not say what memory it needs")
    parts = f"arguments {size(memory.arguments)}, output {size(memory.output)}, temporary {size(memory.temporary)}"
    if limit is not None and memory.needed > limit:
        raise InputError(
            f"{size(memory.needed)} a device needed ({parts}), {size(limit)} there; lower train.batch_size or "
            "data.image_size, use more devices, or train.precision bfloat16"
        )
    return Finding(f"{size(memory.needed)} a device ({parts}); {work}")


def abstract_batch(setup: RunSetup) -> Batch:
    """The shape of a placed training batch, without its memory."""
    rows, shape, sharded = setup.order.batch_size, image_shape(setup.table, setup.data), setup.topology.sharded

    def column(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharded)

    return Batch(
        image=column(np.uint8, *shape),
        label=column(np.int32),
        mask=column(np.float32),
        row=column(np.int32),
        epoch=column(np.int32),
        substituted=column(np.float32) if setup.substitutes else None,
    )


def checkpoint_bytes(state: TrainState, keep: int) -> int:
    """What a work directory's checkpoints take at most: the latest, the best, and the one being written."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * (keep + 2)
