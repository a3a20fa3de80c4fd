"""What the keys that a config leaves to its choices are where no choice says it: to the hooks of a recipe file, which
stand for a choice, and in a report beside the runs of releases in which such a key could not be absent.

A key that is added now need not be here: no release wrote it, and a hook sees None.
"""

USUAL = {
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
