"""Values that replace None in a config if no built-in choice provides a default.

A hook of a recipe file replaces a built-in choice, such as an optimizer, and receives these values. Reports use them to
compare runs with runs of older releases, in which these keys always had a value. A new key needs no value here: a hook
receives None for it.
"""

FALLBACK_VALUES = {
    "model.width": 64,
    "model.stem": "imagenet",
    "model.batch_norm": "local",
    "model.zero_init_last_scale": True,
    "model.shortcut_norm": True,
    "model.weight_init": "he_normal",
    "model.blur_pool": False,
    "model.drop_path": 0.0,
    "objective.temperature": 4.0,
    "objective.teacher_share": 0.9,
    "objective.unlabelled_ratio": 7,
    "objective.unlabelled_weight": 1.0,
    "objective.threshold": 0.95,
    "objective.strong_rand_augment": 2,
    "objective.strong_rand_magnitude": 10.0,
    "objective.strong_cutout": 0.5,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": True,
    "optimizer.beta2": 0.999,
    "optimizer.trust_coefficient": 0.001,
    "optimizer.step_at": (1 / 3, 2 / 3, 8 / 9),
    "optimizer.step_factor": 0.1,
    "optimizer.end_factor": 0.0,
    "optimizer.power": 2.0,
    "optimizer.decay_share": 0.2,
    "optimizer.plateau_factor": 0.1,
    "optimizer.plateau_patience": 10,
}
