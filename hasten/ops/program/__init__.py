"""A whole decoder as a list of instructions over rows, run by one native call a step.

`cpu.h` states what each instruction does, `reference.py` the same in plain torch, `codes.py` names functions.
Programs are made by `hasten.serve`; the design is docs/design/003-serving.md.
"""
