# vLLM with paceline's proposer. The proposer needs torch and numpy, which vLLM brings: nothing else is installed.
FROM vllm/vllm-openai:v0.32.0
COPY . /opt/paceline
RUN pip install --no-cache-dir --no-deps /opt/paceline
