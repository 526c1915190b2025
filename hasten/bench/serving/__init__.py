"""`hasten bench serve`: servers behind the same HTTP door under the same load."""
