"""Makes a page for each config of configs/ from its docstring, its curves and its source."""

import ast
import inspect
import re

import jax
import numpy as np

from jaxddp.config import load
from jaxddp.data.batch import Growth
from jaxddp.recipe.sources import config_names
from jaxddp.schedules import Steps, make_schedule
from website.documents import ROOT
from website.plots import line_plot

EXAMPLES = {"imagenet": 1_281_167, "cifar": 50_000, "fashion": 60_000, "digits": 1_497}
"""The number of training images, by the first word of a config's name without digits."""
OTHER_EXAMPLES = 10_000
"""The number of training images for the curves of other configs."""
POINTS = 300
"""The number of points of a curve."""
MEASURED = {"digits": "![Loss, top-1 accuracy, learning rate and images per second](../curves.png)"}
"""Pictures of measured runs, by config."""


def recipe_pages() -> dict[str, str]:
    """Return the Markdown texts by path."""
    return {f"recipes/{name}.md": page_of(name) for name in config_names()}


def page_of(name: str) -> str:
    """Return the page of a config."""
    source = (ROOT / f"configs/{name}.py").read_text("utf-8")
    tree = ast.parse(source)
    text = inspect.cleandoc(ast.get_docstring(tree) or "")
    summary, _, rest = with_links(text).partition("\n\n")
    code = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno :]).strip()
    lines = [f"# {name}", "", summary, "", rest, "", "## Curves", "", *curves(name), ""]
    if name in MEASURED:
        lines += ["A measured run:", "", MEASURED[name], ""]
    return "\n".join([*lines, "## Source", "", f'```python title="configs/{name}.py"', code, "```", ""])


def with_links(text: str) -> str:
    """Return a docstring with links to its papers and repositories."""
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[\g<0>](https://arxiv.org/abs/\1)", text)
    return re.sub(r"github\.com/[\w-]+/[\w.-]*\w", r"[\g<0>](https://\g<0>)", text)


def curves(name: str) -> list[str]:
    """Return plots of the learning rate and, if the images grow, of their side during the run."""
    config, examples = load(name), examples_of(name)
    batch = config.train.batch_size
    total = config.train.duration.steps(num_examples=examples, batch_size=batch)
    warmup = config.optimizer.warmup.steps(num_examples=examples, batch_size=batch, total_steps=total)
    corners = [warmup - 1, warmup] if 0 < warmup < total else []
    steps = np.unique([*np.linspace(0, total - 1, POINTS).astype(int), *corners])
    epochs = steps * batch / examples
    rates = np.asarray(jax.vmap(make_schedule(config, Steps(total, warmup)))(steps))
    plots = [line_plot("Learning rate", epochs, rates, "epoch")]
    sizes = {"num_examples": examples, "batch_size": batch, "total_steps": total}
    if growth := Growth.of(config.data, config.data.image_size, **sizes):
        sides = np.array([growth.side(step) for step in steps.tolist()])
        plots.append(line_plot("Side of the training images in pixels", epochs, sides, "epoch"))
    return plots


def examples_of(name: str) -> int:
    return EXAMPLES.get(name.partition("_")[0].rstrip("0123456789"), OTHER_EXAMPLES)
