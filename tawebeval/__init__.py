"""tawebeval: runs evaluators over the web and streams what they print as events."""

__version__ = "0.1.0"
