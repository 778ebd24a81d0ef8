"""The HTTP surface: routes, uploads and the one table from exception to answer."""
