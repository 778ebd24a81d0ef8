"""The whole daemon under a real twistd, with real git, real clients and real evaluators."""
