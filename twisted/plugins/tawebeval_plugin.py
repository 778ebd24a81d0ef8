"""Makes `twistd tawebeval` known; names the module only, so that listing plugins stays cheap."""

from twisted.application.service import ServiceMaker

tawebeval = ServiceMaker(
    "tawebeval",
    "tawebeval.daemon.tap",
    "Runs evaluators over the web and streams what they print as events.",
    "tawebeval",
)
