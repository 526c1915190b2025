"""`hasten bench generate`: contenders continue the same prompts, each in a process of its own."""
