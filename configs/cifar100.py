"""ResNet-18 with the small stem on CIFAR-100 (the binary version), 200 epochs.

    jaxddp data get cifar100 --out DIR
    jaxddp launch --processes 2 --gpus 0 -- train cifar100 --data.path DIR
    jaxddp train cifar100 --data.path DIR

The second command divides each batch between two processes. Network, learning rate and schedule are those of
github.com/weiaicunzai/pytorch-cifar100, which also rotates images by up to 15 degrees. The source applies batch norm to
the whole batch of 128 images, and weight decay to batch norm and biases too. Here `--model.batch-norm local` does so on
one device; on two, use `--model.batch-norm sync`.

This recipe has not been run on CIFAR-100; the command was tried on a file of the
same format.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.7561, "README of github.com/weiaicunzai/pytorch-cifar100")


def get_config() -> Config:
    return load("cifar10").replace(
        data={"mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)},
        model={"zero_init_last_scale": False},
        train={"batch_size": 128, "duration": "200 epochs"},
        optimizer={
            "learning_rate": 0.1,
            "nesterov": False,
            "schedule": "step",
            "step_at": (0.3, 0.6, 0.8),
            "step_factor": 0.2,
            "warmup": "1 epoch",
        },
    )
