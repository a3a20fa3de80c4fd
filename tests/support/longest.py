"""The longest test files, in the order of their start, so that no long file still runs when all others are done.

`python benchmarks/suite.py` measures them. Files that wait for processes come before files that compute.
"""

LONGEST = (
    "integration/test_notebooks.py",
    "integration/test_stalls.py",
    "integration/test_ray.py",
    "integration/test_launch_files.py",
    "benchmarks/test_gpu_program.py",
    "integration/test_restarts.py",
    "integration/test_faults.py",
    "test_machines.py",
    "test_job.py",
    "integration/test_slurm.py",
    "integration/test_kept_programs.py",
    "integration/test_submitit.py",
    "integration/test_loggers_of_jobs.py",
    "integration/test_namespaces.py",
    "integration/test_launch_predict.py",
    "benchmarks/test_gpu_rehearsal.py",
    "conformance/test_networks.py",
    "test_stream.py",
    "test_recipe_file.py",
    "test_resident.py",
    "test_start.py",
    "test_cli.py",
    "test_ranges.py",
    "test_api.py",
    "test_growth.py",
    "test_predict.py",
    "test_stopping.py",
    "test_self_test.py",
    "conformance/test_listeners.py",
    "conformance/test_formats.py",
    "test_step.py",
)
