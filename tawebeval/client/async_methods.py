"""The methods of asynchronous clients: their coroutines run in any event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from tawebeval.client import operations
from tawebeval.client.http import HttpRequest
from tawebeval.client.operations import (
    Operation,
    Pause,
    RequestResult,
    Stream,
    StreamItems,
    copy_documentation,
)
from tawebeval.client.settings import ClientSettings

P = ParamSpec("P")
T = TypeVar("T")


def _wait(
    operation: Callable[Concatenate[ClientSettings, P], Operation[T]],
) -> Callable[Concatenate[AsyncMethods, P], Coroutine[Any, Any, T]]:
    """Return the method that does all steps of an operation."""

    async def run(client: AsyncMethods, /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps = operation(client, *args, **kwargs)
        outcome: RequestResult | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = await client.execute_step(step)

    copy_documentation(run, operation)
    return run


def _iterate(
    stream: Callable[Concatenate[ClientSettings, P], Stream[T]],
) -> Callable[Concatenate[AsyncMethods, P], AsyncIterator[T]]:
    """Return the method that does the steps of a stream, and yields its items."""

    async def iterate(
        client: AsyncMethods, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[T]:
        steps = stream(client, *args, **kwargs)
        outcome: RequestResult | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration:
                return
            if isinstance(step, StreamItems):
                for item in step.items:
                    yield item
                outcome = None
            else:
                outcome = await client.execute_step(step)

    copy_documentation(iterate, stream)
    return iterate


@attrs.define(eq=False, slots=False)
class AsyncMethods(ClientSettings, ABC):
    """A client of one server with asynchronous methods; a subclass does their steps."""

    evaluate = _wait(operations.evaluate)
    evaluate_problem = _wait(operations.evaluate_problem)
    rerun = _wait(operations.rerun)
    events = _iterate(operations.events)
    pages = _iterate(operations.pages)
    status = _wait(operations.status)
    submission = _wait(operations.submission)
    make_link = _wait(operations.make_link)
    revoke_links = _wait(operations.revoke_links)
    cancel = _wait(operations.cancel)
    environments = _wait(operations.environments)
    evaluations = _iterate(operations.evaluations)
    problems = _iterate(operations.problems)
    problem = _wait(operations.problem)

    @abstractmethod
    async def execute_step(self, step: HttpRequest | Pause) -> RequestResult | None:
        """Do a step of an operation. Raises OSError for a file that cannot be read."""
