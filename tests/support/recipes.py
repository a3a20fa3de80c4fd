"""Texts of recipe files, as users write them."""

NETWORK = """
import flax.linen as nn

class Network(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.classes)(images.mean((1, 2)))
"""
CONFIG = """
from jaxddp.config import Config

def get_config():
    return Config().replace(
        data={"image_size": 6, "crop": "whole", "augment": {"pad": 1}},
        train={"batch_size": 8, "duration": "9 steps"},
        eval={"batch_size": 8, "every": "4 steps"},
        checkpoint={"every": "4 steps"},
        log={"every": "1 step", "to": ("jsonl",)},
        optimizer={"learning_rate": 0.05},
    )
"""
WHOLE = (
    CONFIG
    + """
import jax
import jax.numpy as jnp
import optax
from network import Network

from jaxddp.engine.parts.guard import GradientNorm

def get_model(config, num_classes):
    return Network(num_classes)

def get_loss(config):
    weights = jnp.arange(1.0, 6.0)

    def weighted(logits, labels):
        own = weights[labels]
        return (own * optax.softmax_cross_entropy_with_integer_labels(logits, labels)).sum(), own.sum()

    return weighted

def get_objective(config, topology):
    def penalized(objective):
        def call(params, *arguments, **options):
            sums, state = objective(params, *arguments, **options)
            penalty = sums.values[0, 1] * 0.001 * (params["Dense_0"]["kernel"] ** 2).sum()
            return sums.replace(values=sums.values.at[0, 0].add(penalty)), state

        return call

    return penalized

def get_metrics(config):
    return {"sure": lambda logits, labels: jax.nn.softmax(logits).max(-1)}

def get_optimizer(config, learning_rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(learning_rate, momentum=0.9))

def get_augmentation(config):
    return lambda key, image: image + 0.1 * jax.random.normal(key, image.shape, image.dtype)

class Steps:
    def __init__(self, file):
        self.file = file

    def step(self, record):
        with self.file.open("a") as file:
            file.write(f"{record.step}\\n")

def get_listeners(config, workdir):
    return [Steps(workdir / "steps.txt")]

def get_initialize(config, images):
    def brightened(params, model_state):
        dense = params["Dense_0"]
        return {"Dense_0": {**dense, "bias": dense["bias"] + images(5).mean() / 255}}, model_state

    return brightened

def get_parts(config, steps):
    return [GradientNorm()]
"""
)
DENSE = """
import flax.linen as nn
import optax
from jaxddp.config import Config

class Network(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.classes)(images.reshape(len(images), -1))

def get_config():
    return Config().replace(
        data={"image_size": 6, "crop": "whole", "augment": {"flip": False}},
        train={"batch_size": 8, "duration": "1 epoch", "precision": "float32"},
        optimizer={"warmup": "40 epochs"},
        eval={"batch_size": 8},
    )

def get_model(config, num_classes):
    return Network(num_classes)
"""
