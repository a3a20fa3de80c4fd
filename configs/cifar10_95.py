"""A wider network on CIFAR-10 in 15 epochs, with SGD and Lookahead, for 95%: 1.4 PFLOP in total.

    jaxddp train cifar10_95 --data.path DIR

Jordan 2024 (arXiv:2404.00498), the variant for 95% (airbench95.py of github.com/KellerJordan/cifar10-airbench).
`cifar10_fast_sgd` tells the differences from the source. They apply here too.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.9501, "airbench95.py of github.com/KellerJordan/cifar10-airbench", runs=200)


def get_config() -> Config:
    return load("cifar10_fast_sgd").replace(
        model={"name": "airbench95"},
        train={"duration": "15 epochs"},
        optimizer={"learning_rate": 1.304, "weight_decay": 1.53e-3},
    )
