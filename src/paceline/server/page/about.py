"""GET /page/about: the server as the page's frame describes it."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.drafters import DRAFTERS
from paceline.server.openai.serving import Serving
from paceline.web.api_errors import ApiError


class AboutServing(Serving):
    async def about(self, http: Request) -> Response:
        """Of the default model, or of another one while that is not loaded."""
        found = max(
            self.models.loaded, key=lambda one: (one[0] is self.models.default, one[0].used), default=None
        )
        if found is None:
            raise ApiError(503, "no model is loaded", "server_error", retry_after=1, refusal=None)
        model, engine = found
        llm = engine.llm
        named = {name: DRAFTERS[name].about if name in DRAFTERS else "" for name in llm.drafters}
        return JSONResponse(
            {
                "model": model.name,
                "models": [one.name for one in self.models.models],
                "version": __version__,
                "fingerprint": engine.fingerprint,
                "max_model_len": llm.target.max_context,
                "drafters": [{"name": name, "about": about} for name, about in named.items()],
                "default_drafters": list(llm.spec.drafters),
                "max_draft": llm.spec.max_draft,
                "operator": self.admission.is_operator(http.state.key),
            }
        )
