"""A prepared training: the network of a recipe is initialized, and its programs are compiled.

The state, the random key and the batches are arguments of the compiled programs.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax

import jaxddp.engine.programs as step_programs
from jaxddp.config import Config
from jaxddp.config.registry import CHOICES, OBJECTIVES, OPTIMIZERS, SCHEDULES
from jaxddp.core.errors import InputError, Key, Words, counted, joined, refused
from jaxddp.core.phases import doing, phase
from jaxddp.data.batch import Batch
from jaxddp.data.order import ChosenOrder, EvalOrder
from jaxddp.data.source import VALIDATION, Source, check_comparable, check_labelled, labels_of
from jaxddp.data.united import UnitedSource, own_part, unite
from jaxddp.engine import predictions, statistics
from jaxddp.engine.initial_state import NO_OPTIMIZER, make_init
from jaxddp.engine.objective import Loss, Objective, TrainObjective, example_loss
from jaxddp.engine.parts.averages import with_average
from jaxddp.engine.programs import CompiledPrograms, Program
from jaxddp.engine.self_test import SelfTest
from jaxddp.engine.state import EVAL_MODEL_STATE, TrainState, first_difference
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.measure.memory import memory_errors
from jaxddp.mesh import Device, Topology
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.interface import Model, by_path, trees_of
from jaxddp.recipe.file import CALLED, RecipeFile
from jaxddp.recipe.sources import is_built_in
from jaxddp.setup.feed import LONGEST_CHUNK, eval_batches, limit_batch_size
from jaxddp.setup.initial_weights import WeightsTarget, as_trained, fine_tuned, initial_weights
from jaxddp.setup.network_checks import OWN_WEIGHTS, brings_weights, check_frozen_state
from jaxddp.setup.recipe import Recipe, make_recipe, method_of, minimized
from jaxddp.setup.resources import join_and_resolve, open_resources
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.training.evaluation import Evaluator, ImagePredictor
from jaxddp.training.run import Chunk, Chunks
from jaxddp.weights.places import local_weights

_log = logging.getLogger("jaxddp.experiment")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunSetup(Recipe):
    """A prepared training: a recipe with the settings that depend on its network, and the initialized state.

    The state is replicated on every device. `dataclasses.replace(setup, state=trained)` continues from a trained state.

    Attributes:
        network: the model, adapted to the platform, with adapters; see `jaxddp.models.adapt.for_platform`.
        like: the shape and dtype of each array of the state.
        weights: the initial weights, by path, which replaced freshly initialized arrays.
    """

    network: Model
    state: TrainState
    like: TrainState
    weights: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    programs: CompiledPrograms = dataclasses.field(default_factory=CompiledPrograms)

    @property
    def way(self) -> Way:
        """The way in which the devices divide a step, with the programs that an equal way has compiled."""
        return self.programs(copy.copy, self.layout.way)

    @cached_property
    def key(self) -> jax.Array:
        """The random key of the seed, on every device."""
        return self.topology.random_key(self.feed.order.seed)

    @property
    def slices(self) -> list[tuple[Device, slice]]:
        """Each device, in mesh order, with the rows of a global batch that it computes."""
        return self.layout.way.slices(self.feed.order.num_slots)

    @cached_property
    def supervised(self) -> Objective:
        """The loss that training minimizes and the metrics that it measures, as one function of the parameters."""
        return Objective(self.network, self.loss, self.preprocess, self.metrics, remat=self.config.train.remat)

    @cached_property
    def measured(self) -> TrainObjective:
        """The loss and the metrics of evaluation as one function of the parameters."""
        labelled = Objective(self.network, self.eval_loss, self.preprocess, self.metrics, self.config.eval.views)
        return labelled if self._num_references is None else self.programs(minimized, self.objective, labelled)

    @property
    def _num_references(self) -> int | None:
        """The number of training images to which a validation compares; None for a validation by labels."""
        return method_of(self.objective, "num_references")

    @cached_property
    def phases(self) -> Phases:
        """The phases of a training step."""
        objective = self.programs(minimized, self.objective, self.supervised)
        return Phases(objective, self.optimizer, self.schedule, self.parts)

    @cached_property
    def unmeasured(self) -> TrainObjective:
        """The function that a step minimizes, without metrics."""
        return self.programs(minimized, self.objective, dataclasses.replace(self.supervised, metrics={}))

    def with_loss(self, loss: Loss) -> "RunSetup":
        """Return the setup with another loss for training and evaluation. Raises: see `example_loss`."""
        if loss is self.loss.function is self.eval_loss.function:
            return self
        of_examples = self.programs(example_loss, loss, self.layout.training_data.labels)
        return self.changed(loss=of_examples, eval_loss=of_examples)

    def with_seed(self, seed: int) -> "RunSetup":
        """Return the setup with another seed: another initial state, order of examples, augmentation and dropout.

        A run of the new setup gives the same bits as a run of a setup that was prepared with this seed. Programs are
        not compiled again, and images on the devices stay there. The objects of the recipe stay the same: a model or an
        optimizer that depends on the config's seed does not change. Raises: InputError if the seed is out of range,
        another process uses another seed, or the model is an NNX module, which has its own initial values, and neither
        weights nor `initialize` are given.
        """
        is_other, has_weights = seed != self.feed.order.seed, self.config.model.weights is not None
        if is_other and not has_weights and self.initialize is None and brings_weights(self.model):
            raise InputError(f"with_seed({seed}): {OWN_WEIGHTS}")
        changed = self.changed(config=self.config.replace(seed=seed))
        self.topology.peers.agree({"seed": str(seed)})
        setup = dataclasses.replace(changed, feed=self.feed.with_seed(seed))
        state = setup.initial_state()
        if is_other and not has_weights and _are_equal(self.state.params, state.params):
            _warn_of_equal_starts(self.topology)
        return dataclasses.replace(setup, state=state)

    def initial_state(self) -> TrainState:
        """Return the state of the seed at step 0, with the initial weights; see `make_init`."""
        options = {"parts": self.parts, "transform": self.initialize, "way": self.layout.way}
        shape = self.layout.training_data.image_shape
        init = self.programs(make_init, self.network, self.optimizer, shape, self.topology, **options)
        return init(self.key, self.topology.replicate(dict(self.weights)))

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches of steps `start` to `stop - 1`, on the devices. Earlier batches are not read."""
        return self.feed.batches(start, stop)

    def step(self) -> step_programs.TrainStep:
        """Return a training step, a function (state, batch) that consumes the state, compiled on first use."""
        self.layout.way.check_own_loop()
        step, key = self.layout.way.step(self.phases, compiler_options=self.resources.compiler_options), self.key
        return lambda state, batch: step(state, batch, key)

    def compiled_steps(self, *, resident: bool, phases: Phases | None = None) -> Program:
        """Return the program of the training steps, on batches or on images that are `resident` on the devices."""
        options = {"resident": resident, "compiler_options": self.resources.compiler_options}
        return self.programs(self.way.program, phases or self.phases, **options)

    def own_statistics(self) -> Callable[[TrainState], TrainState] | None:
        """Return the function of the last state that `with_own_statistics` is; None if no part needs it."""
        if not any(EVAL_MODEL_STATE in arrays for arrays in self.like.parts.values()):
            return None
        program, chunks = self.program(Phases(self.unmeasured, statistics.STILL))
        begin = max(0, self.layout.plan.total_steps - statistics.PASSES)
        return partial(statistics.with_own_statistics, way=self.way, program=program, chunks=partial(chunks, begin))

    def program(self, phases: Phases | None = None) -> tuple[Program, Chunks]:
        """Return the program of the training steps, and the function that yields its arguments.

        With other `phases` than those of training, each dispatch has a single step.
        """
        key, plan, resident = self.key, self.layout.plan, self.config.data.cache == "device"
        program = self.compiled_steps(resident=resident, phases=phases)
        if not resident:
            return program, lambda done: (Chunk(1, (batch, key)) for batch in self.batches(done, plan.total_steps))
        longest = self._longest_chunk if self.way.has_loop and phases is None else 1
        length, growth = plan.chunk_length(longest), self.feed.growth
        cuts = [] if growth is None else growth.changes(plan.total_steps)
        return program, lambda done: self.feed.resident_chunks(plan.chunks(done, length, cuts), key)

    @cached_property
    def _longest_chunk(self) -> int:
        shape = self.layout.training_data.image_shape
        return 1 if step_programs.loops_are_slow(self.supervised, self.like, shape, self.topology) else LONGEST_CHUNK

    def self_test(self) -> SelfTest | None:
        """Return the self-test of the gradient; None with one device, or if the config disables it. See `SelfTest`."""
        mode = self.config.parallel.self_test
        if self.topology.num_devices == 1 or mode == "never":
            return None
        # The self-test compares gradients, and metrics have none.
        return self.programs(SelfTest, self.unmeasured, self.way, _first_batch, mode)

    def evaluator(self, source: Source, batch_size: int | None = None, *, resident: bool = False) -> Evaluator:
        """Return an evaluator that measures a state on a source.

        Args:
            batch_size: the global batch size. Default: the batch size of training.
            resident: whether to keep the images on the devices instead of decoding them for each measurement.

        Raises: InputError if the source does not fit the training data or the batch size.
        """
        size = batch_size or self.feed.order.batch_size
        self.topology.check_batch_size(size, "eval.batch_size")
        source = unite(source, self.config.data, self.topology.peers, VALIDATION)
        size = limit_batch_size(size, source, self.topology)
        check_labelled(own_part(source), VALIDATION)
        check_comparable(source, self.resources.train, self.config.data)

        def batches() -> Iterator[tuple[Any, ...]]:
            if resident:
                return self.feed.resident_eval(source, size, self._longest_chunk)
            return zip(eval_batches(source, self.config.data, EvalOrder(len(source), size), self.topology))

        step = self.programs(step_programs.make_eval_step, self.measured, self.topology, resident=resident)
        references = self._references(size) if self.metrics else None
        return Evaluator(step, batches, len(source), metrics=self.metrics, references=references)

    def _references(self, batch_size: int) -> Evaluator | None:
        """Return an evaluator of the training images to which a validation compares; None if there are none."""
        if (count := self._num_references) is None:
            return None
        train = self.resources.train
        rows = labels_of(train).share(count)
        order = ChosenOrder(len(train), limit_batch_size(batch_size, train, self.topology), chosen=tuple(rows.tolist()))
        step = self.programs(step_programs.make_eval_step, self.measured, self.topology)
        batches = partial(eval_batches, train, self.config.data, order, self.topology)
        return Evaluator(step, lambda: zip(batches()), len(rows))

    def predictor(self, count: int) -> ImagePredictor | None:
        """Return a predictor of `count` validation images in the proportions of the classes; None for no images."""
        val, form = self.validated, self.layout.training_data.labels.form
        # A picture shows one label and one prediction. Each process would have to send its images to process 0.
        is_drawn = form == "one label" and self._num_references is None
        if val is None or not count or not is_drawn or isinstance(val, UnitedSource):
            return None
        program = self.programs(predictions.make_classify, self.measured, self.topology)
        rows = labels_of(val).share(count)
        data, max_batch = self.config.data.of_evaluation, self.config.eval.batch_size
        return ImagePredictor(program, val, rows, data, self.topology, max_batch)

    def __repr__(self) -> str:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.like.params))
        batch = f"global batch {self.feed.order.batch_size:,} over {counted(self.topology.num_devices, 'device')}"
        return f"RunSetup({counted(parameters, 'parameter')}, {counted(len(self.resources.train), 'example')}, {batch})"

    def __str__(self) -> str:
        """Return the `repr`, and a line for each device with the rows of a batch that it computes."""
        return "\n".join([repr(self), *(f"  {device}: rows {rows.start}:{rows.stop}" for device, rows in self.slices)])


def _first_batch(first: Any, *more: Any) -> Batch:
    """Return the batch of the first step from the arguments of a program, on batches or on resident images."""
    return first if isinstance(first, Batch) else step_programs.gather_batch(first, more[0], 0)


def _are_equal(params: Any, other: Any) -> bool:
    """Return whether two trees have arrays, and the same ones; False if a step of the user has consumed them."""
    leaves, others = jax.tree.leaves(params), jax.tree.leaves(other)
    if len(leaves) != len(others) or any(leaf.is_deleted() for leaf in leaves):
        return False
    # The first different array ends the comparison, which compiles nothing.
    pairs = zip(leaves, others, strict=True)
    return bool(leaves) and all(np.array_equal(*(each.addressable_data(0) for each in pair)) for pair in pairs)


def _warn_of_equal_starts(topology: Topology) -> None:
    # An `init` or `initialize` of the user ignores its key or its arguments.
    if topology.peers.is_first:
        _log.warning("every seed starts from the same parameters, because they do not depend on the key of the seed")


def check_setup(setup: Any) -> None:
    """Raise `InputError` if `setup` is no `RunSetup`."""
    if not isinstance(setup, RunSetup):
        raise refused("setup", setup, "give what prepare_training returned")


def check_state(state: Any, setup: RunSetup, *, to_train: bool = False) -> None:
    """Check that a state has the parameters and the model state of a setup's network, and `to_train` all other arrays.

    Raises: InputError, which names the first array that differs.
    """
    check_setup(setup)
    if not isinstance(state, TrainState):
        raise refused("state", state, "give a TrainState, which is the first value that train returns")
    ours, like = state, setup.like
    if not to_train:
        ours, like = (each.replace(opt_state=(), parts={}, step=()) for each in (ours, like))
    if difference := first_difference(ours, like):
        problem = "state: {} is {}, and {} in this setup".format(*difference)
        raise InputError(problem, advice="give a state of its model and optimizer")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(ours)):
        raise InputError("state: a step consumed it", advice="give what the step returned, or setup.initial_state()")
    step, devices = state.step, set(setup.topology.mesh.devices.flat)
    held = step.sharding.device_set if isinstance(step, jax.Array) and step.committed else devices
    if held != devices:
        problem = f"state: it is on {len(held)} devices, which are not the {len(devices)} of this setup"
        raise InputError(problem, advice="give setup.topology.replicate(jax.device_get(state))")


@phase("start")
def open_recipe(file: RecipeFile, rate: optax.Schedule | None = None) -> Recipe:
    """Join the job, open the data and make the objects of a recipe file. Nothing is written yet. Raises: InputError.

    The learning rate schedule `rate`, if given, replaces that of the config.
    """
    topology, config = join_and_resolve(file)
    resources = open_resources(config, topology)
    with doing("making network, loss and optimizer"):
        # The config.json of a run holds the precision that its platform chose.
        chosen = config.train.precision if "train.precision" in file.set_keys else None
        recipe = make_recipe(config, topology, resources, objects_of_hooks(file.hooks), rate=rate, precision=chosen)
        recipe = dataclasses.replace(recipe, file=file)
        recipe.early_stopping()
        if rate is None:
            check_keys_of_hooks(file, recipe)
    return recipe


def initialize(recipe: Recipe, *, fresh: bool = True, programs: CompiledPrograms | None = None) -> RunSetup:
    """Initialize the network of a recipe.

    Args:
        fresh: whether the run starts from this state. If a checkpoint replaces it later, no weights or images are read.
        programs: a cache of compiled programs.

    Raises: InputError if the weights are of another network, or the processes have different data.
    """
    layout, topology = recipe.layout, recipe.topology
    resources, order = recipe.resources, recipe.feed.order
    sources = {"training data": resources.train, "unlabelled data": resources.unlabelled}
    values = {name: source.fingerprint for name, source in sources.items() if source is not None}
    values |= {"batch size": str(order.batch_size), "seed": str(order.seed), "gradients come from": str(layout.way)}
    # Processes with different programs would wait for each other forever.
    values["XLA's options"] = str(sorted(resources.compiler_options.items()))
    topology.peers.agree(values | step_programs.jax_settings())
    layout.way.connect()
    # An objective loads its teacher here, because an array cannot be restored while a step is traced.
    if (method := method_of(recipe.objective, "fingerprints")) is not None:
        method(recipe)
    recipe = complete_recipe(recipe)
    network = as_trained(for_platform(recipe.model, topology.platform), recipe)
    weights, config = dict[str, np.ndarray](), recipe.config.model
    if not fresh:
        recipe = dataclasses.replace(recipe, initialize=None)
    elif config.weights is not None:
        ids, shape = resources.train.class_ids, layout.training_data.image_shape
        rename = recipe.file and recipe.file.rename
        target = WeightsTarget(recipe.model, shape, len(ids), tuple(ids), config.fresh_layers, rename=rename)
        with doing(f"reading weights from {config.weights}"):
            weights = initial_weights(local_weights(config.weights, offline=config.offline), target, topology)
    made: Any = {"network": network, "programs": programs or CompiledPrograms(), "state": None, "like": None}
    setup = RunSetup(**vars(recipe), **made, weights=weights)
    out_of_memory = memory_errors(lambda: "while the network was initialized", lambda: "choose a smaller network")
    with doing("initializing the network"), out_of_memory:
        state = jax.block_until_ready(setup.initial_state())
        if fresh and not weights and recipe.file is not None:
            _check_seed_of_hooks(setup, recipe.file, state.params)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return dataclasses.replace(setup, state=state, like=like)


def _check_seed_of_hooks(setup: RunSetup, file: RecipeFile, params: Any) -> None:
    """Log a warning if hooks make the initial parameters of the default seed; for an NNX module, raise `InputError`."""
    seed, default, is_fixed = setup.config.seed, Config().seed, brings_weights(setup.model)
    if seed == default or not file.hooks.keys() & {"get_model", "get_initialize"} or (is_fixed and setup.initialize):
        return
    network, topology, data = setup.network, setup.topology, setup.layout.training_data
    if is_fixed:
        network = adapt(file.hooks["get_model"](setup.config.replace(seed=default), data.labels.num_classes))
    # No optimizer state: memory may not suffice for two.
    init = make_init(network, NO_OPTIMIZER, data.image_shape, topology, transform=setup.initialize)
    if not _are_equal(params, init(topology.random_key(default)).params):
        return
    if is_fixed:
        raise InputError(f"{file.hooks['get_model'].path}: get_model: ", Key("seed", seed), f": {OWN_WEIGHTS}")
    _warn_of_equal_starts(topology)


def complete_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with what depends on the network: the settings of single layers, and averaging."""
    shape = recipe.layout.training_data.image_shape
    params, model_state = trees_of(as_trained(recipe.model, recipe), shape)
    recipe = fine_tuned(recipe, {path: leaf.shape for path, leaf in by_path(params, model_state).items()})
    check_frozen_state(recipe.model, recipe.config.frozen_norms, (params, model_state), shape)
    opt_state = jax.eval_shape(recipe.optimizer.init, params)
    recipe.layout.way.check(recipe.parts, opt_state)
    return dataclasses.replace(recipe, parts=with_average(recipe.parts, opt_state))


def check_keys_of_hooks(file: RecipeFile, recipe: Recipe) -> None:
    """Check that each key that is set for a replaced choice has an effect.

    These keys are the name of the choice, the settings of all choices of the kind, and the other keys that the choices
    read. For objectives it is the name alone, because an objective may read other keys while the step is traced. A key
    has an effect if a hook, or a function that a hook returned, reads it, or another part of the run. Raises:
    InputError if a key of `file.set_keys` has no effect. The message names all such keys, and the hooks.
    """
    values = recipe.config.flat()
    set_keys = {key for key in file.set_keys if values[key] is not None}
    kinds = [kind for kind in CHOICES if kind.hook in file.hooks]
    if not set_keys or not kinds:
        return
    if OPTIMIZERS in kinds:
        # The optimizer may read keys in its update. The step calls it in the same way, and reports its errors.
        try:
            params, _ = trees_of(recipe.model, recipe.layout.training_data.image_shape)
            jax.eval_shape(recipe.optimizer.update, params, jax.eval_shape(recipe.optimizer.init, params), params)
        except Exception:
            return
    read = _read_by_hooks(file, recipe)
    problems, names = dict[str, Words](), set[str]()
    for kind in kinds:
        hook = file.hooks[kind.hook]
        reader = f"{kind.hook} of {hook.path.stem if is_built_in(hook.path) else hook.path}"
        keys = {kind.key} if kind is OBJECTIVES else {kind.key, *kind.readers(), *kind.also_read}
        unread = keys & set_keys - read
        for key in sorted(unread):
            problems[key] = Key(key, values[key]), f" has no effect, because {reader} does not read it"
        names |= {kind.key} if unread and kind is not SCHEDULES else set()
    if problems:
        advice: tuple[Words, ...] = ("leave it out" if len(problems) == 1 else "leave them out",)
        if len(names - problems.keys()) == 1:
            advice += (", or replace the hook by setting ", *map(Key, names))
        raise InputError(*joined("; ", problems.values()), advice=advice)


def _read_by_hooks(file: RecipeFile, recipe: Recipe) -> set[str]:
    """Return the keys that hooks read, and those on which the arguments of `get_optimizer` or a part depend."""
    read = set[str]().union(*(hook.read for hook in file.hooks.values()))
    of_optimizer = file.hooks[OPTIMIZERS.hook].read if OPTIMIZERS.hook in file.hooks else ()
    schedule = recipe.config.optimizer.schedule
    of_schedule = {SCHEDULES.key, *SCHEDULES.keys_read(schedule)}
    if CALLED in of_optimizer:
        read |= {*of_schedule, *SCHEDULES.also_read}
    elif any(part.name == schedule for part in recipe.parts):
        read |= of_schedule
    if "optimizer.learning_rate" in of_optimizer:
        # The hook receives the learning rate for the batch size.
        read |= {"optimizer.reference_batch", "optimizer.scaling"}
    return read
