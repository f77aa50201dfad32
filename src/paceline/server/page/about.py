"""GET /page/about: the server as the page's frame describes it."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.drafters import DRAFTERS
from paceline.server.openai.serving import Serving


class AboutServing(Serving):
    async def about(self, http: Request) -> Response:
        llm = self.engine.llm
        named = {name: DRAFTERS[name].about if name in DRAFTERS else "" for name in llm.drafters}
        return JSONResponse(
            {
                "model": llm.name,
                "version": __version__,
                "fingerprint": self.engine.fingerprint,
                "max_model_len": llm.target.max_context,
                "drafters": [{"name": name, "about": about} for name, about in named.items()],
                "default_drafters": list(llm.spec.drafters),
                "max_draft": llm.spec.max_draft,
                "operator": self.admission.is_operator(http.state.key),
            }
        )
