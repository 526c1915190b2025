"""Generation and serving: weights in panels, a native program, the engine, and the doors to it."""
"""Generation and serving: a decoder-only model as a native program over a paged cache, behind one engine."""
