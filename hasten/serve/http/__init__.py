"""The HTTP door of a server: OpenAI's API. See `app.py` for the paths."""
