# The server, the gate and every other command, for machines without a GPU: docs/install.md
#   docker build -f deploy/paceline.Dockerfile -t paceline .

# The kernels are compiled here: the image itself has no compiler.
FROM python:3.12-slim AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    torch==2.13.0 "paceline[postgres,otel] @ file://$(find /wheels -name 'paceline-*.whl')"
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/paceline paceline
USER 10001
ENV PACELINE_HOME=/var/lib/paceline
VOLUME /var/lib/paceline
EXPOSE 8000
ENTRYPOINT ["paceline"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
