"""The path and the response members of TuringArena's clients of 2018 (contract, section 7).

These clients poll /evaluation_events and give up after about 30 seconds of empty pages. They poll
fast at first, then every three seconds. So a poll there waits although the client does not ask for
that.
"""

from __future__ import annotations

from klein import Klein
from twisted.web.iweb import IRequest

from tawebeval.errors import InvalidField
from tawebeval.web.context import WebContext
from tawebeval.web.events import read_page
from tawebeval.web.responses import cast_request, get_argument, send


def make_evaluate_response(identifier: str) -> dict[str, str]:
    """Return the response of POST /evaluate; older clients read `id`."""
    return {"evaluation_id": identifier, "id": identifier}


def add_routes(app: Klein, context: WebContext) -> None:
    """Add the route /evaluation_events to `app`."""

    @app.route("/evaluation_events", methods=["GET"])
    async def older_events(request: IRequest) -> bytes:
        """Return a page of events; wait `polls.older` seconds if the client names none."""
        identifier = get_argument(request, "evaluation")
        if not identifier:
            raise InvalidField("evaluation", "is required")
        wait = context.configuration.polls.older
        _, page = await read_page(context, cast_request(request), identifier, wait)
        return send(request, page.encode())
