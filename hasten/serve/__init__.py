"""Generation and serving: weights in panels, a native program, the engine, and the doors to it."""
