"""Stub, replaced by the store's branch."""
from __future__ import annotations
from typing import Any
class EvaluationStore:
    add: Any
    save: Any
    delete: Any
    save_callback: Any
    delete_callback: Any
