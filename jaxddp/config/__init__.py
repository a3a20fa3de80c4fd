"""The classes of a config. The `get_config()` of a recipe file returns a `Config`.

A recipe can load another one and change only some keys:

    def get_config():
        return load("imagenet_resnet50").replace(model={"name": "resnet34"})

A config describes the recipe and not the machine. Batch sizes are global, and the result does not depend on the number
of devices, except with local batch norm (`model.batch_norm`), which normalizes each device's part of a batch by itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp.config.data_section import AugmentConfig, DataConfig
    from jaxddp.config.tree import *  # noqa: F403
    from jaxddp.recipe.file import Reference, load


def __getattr__(name: str) -> Any:
    # The sections are imported on first use: a module of choices, such as `jaxddp.optimizers`, imports the registry,
    # and the sections import this module in turn.
    if not name.startswith("_"):
        import jaxddp.config.data_section as data_section
        import jaxddp.config.tree as tree
        import jaxddp.recipe.file as file

        for module in (tree, data_section, file):
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module 'jaxddp.config' has no attribute {name!r}")
