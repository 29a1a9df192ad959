"""Programs: train, evaluate, generate; `python -m experiments.train --help`."""
