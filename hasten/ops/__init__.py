"""Operators, a folder each. `every.py` defines all that torch is to know of; level, panels, programs and
sampling are used without torch, too."""
