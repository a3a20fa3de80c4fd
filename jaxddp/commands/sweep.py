"""`jaxddp sweep CONFIG`: train a config with all combinations of some values, or with values that a search suggests."""

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from jaxddp.command_line.parse import parse, parse_recipe, workdir_of
from jaxddp.command_line.terminal import IMPORTING, print_table
from jaxddp.command_line.words import by_key, config_and_words, format_option, is_flag, options_of
from jaxddp.commands.train import Train
from jaxddp.commands.train import run as train
from jaxddp.config.values import HELP
from jaxddp.core.errors import InputError, Key, counted, key_of_option, metric_name, some
from jaxddp.core.log import say
from jaxddp.core.phases import doing
from jaxddp.core.ranges import Range, Seed
from jaxddp.recipe.file import RecipeFile
from jaxddp.recipe.sources import is_built_in, recipe_path
from jaxddp.reports.tables import Estimate, is_run, number
from jaxddp.sweeps.folder import RESULTS, SweepFolder, folds_of, report, seed_table, table, write_results
from jaxddp.sweeps.queues import GridQueue, Search, SearchQueue
from jaxddp.sweeps.runner import Runner, describe, slots
from jaxddp.sweeps.trials import FOLD, MOST_TRIALS, VAL_FOLD, Template, Trial, space_of, trial_name
from jaxddp.training.checkpoints.integrity import sha256


@dataclass(frozen=True)
class Sweep:
    """Train a config once for each combination of some values, each in its own process and work directory.

    Every option of `jaxddp train CONFIG` is allowed. An option with several values is varied: a,b,c, or A:B for the
    whole numbers from A to B - 1. A text that may contain commas, such as model.freeze, is not split; give the option
    once for each value. With --search optuna, A..B and A..B:log are intervals. The same command resumes the sweep.

    Example: jaxddp sweep digits --data data/digits --lr 1e-3,3e-3 --seed 0:3 --workdir runs/rates
    """

    workdir: Path = Path("runs/CONFIG-sweep")
    """The folder of the sweep. Each trial has its work directory in it."""
    folds: Annotated[int, Range(2, 1000)] | None = None
    """Train one run for each fold of the training data, as data.fold, and write the predictions of the images that each
    run did not see."""
    jobs: Annotated[int, Range(1, 10_000)] = 1
    """Number of trials that run side by side. The GPUs, or without GPUs the cores, are divided among them."""
    search: Literal["optuna"] | None = None
    """Let Optuna's TPE suggest the values, by the best validation (checkpoint.best) of the trials so far. If None, all
    combinations."""
    trials: Annotated[int, Range(1, MOST_TRIALS)] | None = None
    """With --search, the number of trials, over all hosts and all starts of the sweep."""
    search_seed: Seed = 0
    """With --search, the seed of the suggestions."""
    prune: bool = False
    """With --search, stop a trial whose best validation is worse than the median of the earlier trials."""
    restarts: Annotated[int, Range(0, 1_000_000)] = 1
    """How often a failed trial is started again, from its last checkpoint; not after bad input."""
    save_grace: Annotated[float, Range(0, 1_000_000)] = 120.0
    """After Ctrl-C or SIGTERM, seconds that every trial has to save before it is killed."""
    verbose: bool = False
    """Also print the output of the trials. It is always in `output.log` in their work directories."""
    list: bool = False
    """Print the command of each trial, one per line, and train nothing."""
    index: Annotated[int, Range(0, MOST_TRIALS)] | None = None
    """Train only the trial with this number, from 0, as a task of a job array does."""


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code; see `Runner.run`. The first argument is the config.

    Raises: InputError; see also `jaxddp.core.errors`.
    """
    name, rest = config_and_words("sweep", arguments)
    if {*HELP} & {*arguments}:
        parse(Sweep, Sweep(), "jaxddp sweep CONFIG", [HELP[0]])
    own, template = _split(name, rest)
    path = recipe_path(name)
    options = parse(Sweep, Sweep(workdir=Path("runs") / f"{workdir_of(path).name}-sweep"), f"jaxddp sweep {name}", own)
    if options.folds is not None:
        template = template.with_folds(options.folds)
    _check(options, template)
    folder = SweepFolder(options.workdir, path.stem if is_built_in(path) else str(path.absolute()))
    folder.read()  # Another config is reported before the trials are checked.
    if options.list or options.index is not None:
        return _one_by_one(options, template, folder)
    with doing("checking the trials"):
        if options.search is None:
            queue = GridQueue(folder, _trials(template, options.workdir))
        else:
            queue = _search(options, template, folder)
    return _run(options, queue)


def _split(name: str, rest: Sequence[str]) -> tuple[list[str], Template]:
    """Return the options of the sweep itself, and the template of the trials' commands. Raises: InputError."""
    own_keys, keys = options_of(Sweep), options_of(Train)
    entries = by_key(rest, keys | own_keys)
    own = [word for key, words in entries if key in own_keys for word in words]
    others = [(key, words) for key, words in entries if key not in own_keys]
    texts, template = defaultdict[str, list[str]](list), dict[str, tuple[str, ...]]()
    for key, (word, *values) in others:
        _, equals, value = word.partition("=")
        if key in keys and (equals or len(values) == 1):
            texts[key].append(value if equals else values[0])
    spaces = {key: space for key in texts if (space := space_of(key, keys[key], texts[key])) is not None}
    for place, (key, words) in enumerate(others):
        option, equals, _ = words[0].partition("=")
        if key in spaces:
            template.setdefault(key, ((format_option(key) if is_flag(keys[key]) else option) + equals,))
        else:
            template[f"#{place}"] = tuple(words)
    return own, Template(name, template, spaces)


def _check(options: Sweep, template: Template) -> None:
    """Check the options of a sweep. Raises: InputError."""
    if not template.spaces:
        _recipe(template.words({}), options.workdir)
        raise InputError("sweep: no option has several values; give some, such as --lr 1e-3,3e-3 or --seed 0:3")
    if "resume" in {key_of_option(words[0]) for words in template.entries.values()}:
        raise InputError("--resume: a sweep always resumes its trials; leave it out")
    if "checkpoint.best" in template.spaces:
        raise InputError(Key("checkpoint.best"), ": the trials of a sweep are compared by it; give one value")
    if options.search is None:
        for key in ("trials", "search_seed", "prune"):
            if getattr(options, key) != getattr(Sweep, key):
                raise InputError(f"{format_option(key)}: has no effect without --search optuna")
    elif {FOLD, VAL_FOLD} & template.spaces.keys():
        raise InputError("--search: compares trials, and folds belong together; leave --search or the folds out")
    elif options.trials is None:
        raise InputError("--search: give the number of trials with --trials N")
    elif options.list or options.index is not None:
        raise InputError("--search: suggests the trials one after another; leave --list and --index out")
    if is_run(options.workdir):
        raise InputError(f"{options.workdir}: is the work directory of a run; give another --workdir")


def _trial(template: Template, folder: Path, values: Mapping[str, str]) -> Trial:
    """Return a trial. Raises: InputError if `jaxddp train` does not accept its arguments."""
    words = template.words(values)
    recipe = _recipe(words, folder)
    if "jsonl" not in (loggers := recipe.config.log.to):
        raise InputError(Key.plain("log.to", ",".join(loggers)), ": the sweep reads the files of jsonl; name it, too")
    flat = recipe.config.flat()
    digest = sha256(json.dumps([flat, recipe.entry()]).encode())
    return Trial(trial_name({key: flat[key] for key in values}), dict(values), words, recipe=digest)


def _recipe(words: Sequence[str], folder: Path) -> RecipeFile:
    return parse_recipe(Train, "jaxddp train", [*words, "--workdir", str(folder)])[1]


def _trials(template: Template, folder: Path) -> list[Trial]:
    """Return all trials of a grid. Raises: InputError if one is not accepted, or if two are equal."""
    trials = dict[str, Trial]()
    for trial in (_trial(template, folder, values) for values in template.grid()):
        if (twin := trials.setdefault(trial.name, trial)) is not trial:
            one, other, spaces = twin.values, trial.values, template.spaces
            # A word that is given twice differs from its twin in no key.
            key = max(other, key=lambda key: (one[key] != other[key], spaces[key].words.count(other[key])))
            raise InputError(Key(key), f": {one[key]} and {other[key]} are the same value; give each value once")
    return [*trials.values()]


def _one_by_one(options: Sweep, template: Template, folder: SweepFolder) -> int:
    """Print the commands of all trials, or train one in this process."""
    if options.list:
        for trial in _trials(template, options.workdir):
            print(shlex.join(["jaxddp", *trial.command(options.workdir)]))
        return 0
    grid = [*template.grid()]
    if options.index is None or options.index >= len(grid):
        raise InputError(f"--index {options.index}: the sweep has {counted(len(grid), 'trial')}, from 0")
    trial = _trial(template, options.workdir, grid[options.index])
    GridQueue(folder, [trial])  # A command that reads the folder knows that the trial is not finished.
    train(trial.command(options.workdir)[1:])
    with folder.changed() as known:
        known[trial.name].finished_words = trial.words
    return 0


def _search(options: Sweep, template: Template, folder: SweepFolder) -> SearchQueue:
    """Return the queue of a search. Raises: InputError if a value, or a bound of an interval, is not accepted."""
    first = {key: space.words[0] for key, space in template.spaces.items()}
    for key, space in template.spaces.items():
        for word in space.words[1:]:
            _trial(template, options.workdir, first | {key: word})
    checkpoint = _recipe(template.words(first), options.workdir).config.checkpoint
    # The direction is the same for averages.
    search = Search(template.spaces, checkpoint.goal(averages=False).lowest, options.search_seed)
    make_trial = partial(_trial, template, options.workdir)
    return SearchQueue(folder, search, make_trial, options.trials or 1, prune=options.prune)


def _run(options: Sweep, queue: GridQueue) -> int:
    """Run the trials of a queue, and print the table."""
    places = slots(options.jobs)
    say(f"jaxddp sweep: {queue.summary()}, {describe(places)}, in {options.workdir}")
    if queue.earlier:
        say(f"jaxddp sweep: of an earlier command, not continued: {some(queue.earlier)}")
    code = Runner(options.workdir, queue, places, options.restarts, options.save_grace, options.verbose).run()
    if queue.error is not None:
        raise queue.error
    rows = queue.folder.results(queue.earlier)
    write_results(options.workdir, rows)
    for shown in filter(None, (table(rows), seed_table(rows))):
        print_table(*shown)
    if code not in (0, 1):
        say("jaxddp sweep: stopped; the same command continues")
        return code
    with doing("writing the report"):
        print(f"{report(options.workdir, rows)}\n{options.workdir / RESULTS}: {counted(len(rows), 'trial')}")
    if unfinished := queue.unfinished():
        states = {row.trial.name: row.status for row in rows}
        names = [f"{trial.name} ({states.get(trial.name)})" for trial in unfinished]
        say(f"jaxddp sweep: not finished: {some(names)}; the same command continues")
    elif recipes := folds_of([row.trial for row in rows if row.trial.name not in queue.earlier]):
        with doing(IMPORTING):
            from jaxddp.inference.output_files import write_out_of_fold
        for name, trials in recipes.items():
            out = options.workdir / f"out_of_fold{name}.csv"
            whole, folds = write_out_of_fold([options.workdir / trial.name for trial in trials], out)
            means = {key: Estimate.of(key, [each[key] for each in folds]) for key in whole}
            cells = [(metric_name(key), number(key, value), str(means[key])) for key, value in whole.items()]
            print_table(("metric", "out of fold", "mean over folds"), cells)
            print(out)
    return code
