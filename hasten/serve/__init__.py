"""Generation and serving: a decoder-only model as a native program over a paged cache, behind one engine."""
