"""Capture of repeated blocks, canonical form, rules, passes, proof; and the doors that use them."""
