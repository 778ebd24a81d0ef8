"""What TuringArena's clients of 2018 want, which know nothing newer (contract, section 7).

They ask for pages at another place, and give up after about 30 seconds of empty ones, which
they ask for faster at first and then every three seconds. So there a request for events waits
although it does not say so.
"""

from __future__ import annotations

from klein import Klein
from twisted.web.iweb import IRequest

from tawebeval.errors import InvalidField
from tawebeval.web.context import WebContext
from tawebeval.web.events import read_page
from tawebeval.web.responses import argument, received, send


def answer_to_form(identifier: str) -> dict[str, str]:
    """Return the answer to a form, in which older clients look for `id`."""
    return {"evaluation_id": identifier, "id": identifier}


def add_routes(app: Klein, api: WebContext) -> None:
    """Add the older place of pages to the application."""

    @app.route("/evaluation_events", methods=["GET"])
    async def older_events(request: IRequest) -> bytes:
        """Return a page of events, waiting for some unless the client says for how long."""
        identifier = argument(request, "evaluation")
        if not identifier:
            raise InvalidField("evaluation", "is missing")
        wait = api.configuration.polls.older
        _, page = await read_page(api, received(request), identifier, wait)
        return send(request, page.encode())
