"""Predicts memory and step time of a training run without a device, and searches its layout.

Pure functions of facts: `ModelShape`, `Cluster`, `Layout` and `Job` go in, an `Estimate` comes out. No torch.
"""
