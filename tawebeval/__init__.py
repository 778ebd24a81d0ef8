"""tawebeval: runs evaluators over the web and streams what they print as events."""

from tawebeval_client import __version__ as __version__
