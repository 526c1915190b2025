"""Measurements: contenders in turn in separate processes, medians, ratios, and the share of a measured limit.

A speed-up is printed only where the results agree.
"""
