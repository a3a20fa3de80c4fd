"""Rehearses the start of a run: it opens the data, decodes a few images, and compiles the step."""

import dataclasses
import time
from itertools import islice

import jax

from jaxddp.cluster.doctor.machine_checks import Finding
from jaxddp.config import Config
from jaxddp.core.wording import counted, speed
from jaxddp.data.batch import Batch
from jaxddp.data.opening import labelled_and_unlabelled, open_tables
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.source import Source
from jaxddp.engine.groups.group_mesh import unstacked_shapes
from jaxddp.engine.state import TrainState
from jaxddp.measure.memory import Fit, MemoryReport, Needs
from jaxddp.recipe_file import RecipeFile
from jaxddp.setup.prepare import initialize, open_recipe
from jaxddp.setup.run_setup import RunSetup
from jaxddp.training.device_memory import needs_of_batch
from jaxddp.training.progress import count_parameters

SAMPLE_IMAGES = 512
_SAMPLE_BATCH = 16


def data(config: Config, process: int = 0) -> Finding:
    """Open the data, and check that every image exists. The value is the training and validation tables."""
    train_table, val_table = open_tables(config.data.of_process(process), config.eval.limit)
    train_table, unlabelled = labelled_and_unlabelled(train_table, config.data)
    more = "" if unlabelled is None else f", {len(unlabelled):,} without labels"
    counts = f"{counted(len(train_table), 'row')} to train, {len(val_table):,} to validate{more}"
    detail = f"{counts}, {counted(train_table.num_classes, 'class')}; every image is there"
    return Finding(detail, (train_table, val_table))


def images(config: Config, tables: tuple[Source, Source], process: int) -> Finding:
    """Decode the first training images, with different images in each process, and the first validation images."""
    train_source, val_source = tables
    size = min(_SAMPLE_BATCH, len(train_source))
    steps = -(-min(SAMPLE_IMAGES, len(train_source)) // size)
    order = SampleOrder(len(train_source), size, config.seed)
    step_numbers = range(process * steps, (process + 1) * steps)
    batches = train_source.train_batches(
        order, config.data, step_numbers, substitutes=train_source.substitutes(config.data)
    )
    # The first batch is not timed, because it includes the start of reading and decoding.
    decoded, begin = len(next(batches).row), time.perf_counter()
    timed = sum(len(batch.row) for batch in batches)
    pace = f" at {speed(timed / (time.perf_counter() - begin))} images/s" if timed else ""
    evaluation = val_source.eval_batches(EvalOrder(len(val_source), _SAMPLE_BATCH), config.data.of_evaluation)
    validated = int(sum(batch.mask.sum() for batch in islice(evaluation, steps)))
    return Finding(f"{decoded + timed} read for training{pace}, {validated} for validation")


def recipe(file: RecipeFile) -> Finding:
    """Set up the run as training does. The value is the setup."""
    setup = initialize(open_recipe(file))
    steps = f"{counted(setup.layout.plan.total_steps, 'step')} of {counted(setup.feed.order.batch_size, 'image')}"
    count = count_parameters(setup.state.params)
    name = "the recipe's own network" if "get_model" in file.hooks else file.config.model.name
    return Finding(
        f"{name}, {count:,} parameters; {steps}", dataclasses.replace(setup, state=setup.placed(setup.state))
    )


def step(setup: RunSetup) -> Finding:
    """Compile the training step. Report its FLOPs and memory, including the images that stay on the devices.

    Raises:
        InputError: the step does not fit into the memory of the devices of this process.
    """
    program = setup.programs.train(setup.supervised, setup, resident=False)
    begin = time.perf_counter()
    feed, division = (abstract_batch(setup), setup.key), setup.layout.division
    program.prepare(setup.state, *feed)
    cost = program.cost
    assert cost is not None
    work = f"{cost.flops / 1e9:.3g} GFLOP a step; compiled in {time.perf_counter() - begin:.0f} s"
    kept = setup.feed.resident_bytes(setup.validated) if setup.config.data.cache == "device" else {}
    needs = Needs.of(cost, unstacked_shapes(setup.state).params, setup.topology, kept)
    fit = Fit.of(division, [MemoryReport.of(needs, setup.topology, setup.state)])
    fit.check(lambda changed: needs_of_batch(changed, division, program.function, setup.state, feed, setup.topology))
    return Finding(f"{work}; {fit}")


def abstract_batch(setup: RunSetup) -> Batch:
    """Return the shapes and dtypes of a placed training batch, without allocating memory for the batch."""
    batch, sharded = setup.feed.abstract_batch(), setup.topology.sharded
    return jax.tree.map(lambda column: jax.ShapeDtypeStruct(column.shape, column.dtype, sharding=sharded), batch)


def checkpoint_bytes(state: TrainState, keep: int) -> int:
    """Return the maximum bytes of a run's checkpoints: the last `keep`, the best, and the one being written."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * (keep + 2)
