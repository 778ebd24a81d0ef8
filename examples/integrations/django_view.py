"""Django: students submit a file, and see what the evaluator has printed so far.

`read_events` runs outside of requests, in a task queue or a management command. It stores the
cursor with the output: after a crash it continues there, and no event is lost or shown twice.

    urlpatterns = [
        path("submit", django_view.submit),
        path("attempts/<int:number>", django_view.show),
    ]
"""

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.db import models
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_GET, require_POST

from tawebeval_client import Client, EvaluationError, InvalidRequest, NamedFile, Text, Unavailable

# Threads share it, and processes that a server forks.
client = Client(settings.TAWEBEVAL_SERVER, settings.TAWEBEVAL_TOKEN)


class Attempt(models.Model):
    """One submission of a student."""

    evaluation = models.CharField(max_length=200, unique=True)
    output = models.TextField(default="")
    cursor = models.CharField(max_length=200, null=True)
    state = models.CharField(max_length=20, default="running")
    has_failed = models.BooleanField(default=False)  # by the last event that is stored

    class Meta:
        """Where the table belongs."""

        app_label = "judge"


@require_POST
def submit(request: HttpRequest) -> JsonResponse:
    """Begin an evaluation of the field `file` for the problem in the field `problem`."""
    file = request.FILES.get("file")
    if not isinstance(file, UploadedFile) or file.size > 65_536:
        return JsonResponse({"error": "choose a file of at most 64 KiB"}, status=400)
    source = NamedFile(file.name or "source", file.read())
    try:
        identifier = client.evaluate_problem(request.POST.get("problem", ""), {"source": source})
    except InvalidRequest as error:
        return JsonResponse({"error": str(error)}, status=400)
    except Unavailable:
        return JsonResponse({"error": "the judge is away; try again in a minute"}, status=503)
    attempt = Attempt.objects.create(evaluation=identifier)
    return JsonResponse({"attempt": attempt.pk}, status=201)


@require_GET
def show(request: HttpRequest, number: int) -> JsonResponse:
    """Show the output so far. The page asks again until the state is no longer `running`."""
    attempt = get_object_or_404(Attempt, pk=number)
    return JsonResponse({"state": attempt.state, "output": attempt.output})


def read_events(attempt: Attempt) -> None:
    """Read an evaluation to its end. Requesting the next page acknowledges the stored one."""
    for page in client.pages(attempt.evaluation, attempt.cursor):
        for event in page.events:
            attempt.has_failed = isinstance(event, EvaluationError) and event.is_failure
            if isinstance(event, Text):
                attempt.output += event.text
        attempt.cursor = page.end
        attempt.save()
    attempt.state = "failed" if attempt.has_failed else "finished"
    attempt.save()
