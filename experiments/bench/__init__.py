"""Timings of this project against what it replaces; each module is a program."""
