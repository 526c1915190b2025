"""Scores the planner on published runs: `python -m benchmarks.planner --data DIR --json FILE`."""
