# The gate needs no GPU and no model.
FROM python:3.11-slim
COPY . /opt/paceline
RUN pip install --no-cache-dir "torch==2.13.0" "/opt/paceline[postgres,otel]"
USER nobody
ENTRYPOINT ["paceline"]
