"""The first minutes on a GPU: `python -m experiments.gpu_suite`."""
