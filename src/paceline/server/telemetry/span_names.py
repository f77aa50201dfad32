"""Attribute names of spans. The GenAI conventions still change, so they are written here and nowhere else.

Names and units: OpenTelemetry semantic conventions 1.41. Times are in seconds.
"""

from typing import Final

PROVIDER: Final = "paceline"
OPERATIONS: Final = {  # by the path of the URL
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
PER_TOKEN: Final = "gen_ai.server.time_per_output_token"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
ERROR_TYPE: Final = "error.type"
URL_PATH: Final = "url.path"

# As vLLM calls them.
IN_QUEUE: Final = "gen_ai.latency.time_in_queue"
IN_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
IN_DECODE: Final = "gen_ai.latency.time_in_model_decode"

# No convention speaks of speculative decoding.
ROUTE: Final = "route.name"
SPEC_METHOD: Final = "spec.method"
SPEC_MAX: Final = "spec.num_spec_tokens"
SPEC_STEPS: Final = "spec.num_steps"
SPEC_DRAFTED: Final = "spec.draft_tokens"
SPEC_ACCEPTED: Final = "spec.accepted_tokens"
SPEC_LENGTH: Final = "spec.mean_acceptance_length"
SPEC_HISTOGRAM: Final = "spec.acceptance_histogram"
SPEC_DRAFT_TIME: Final = "spec.draft_time_s"
SPEC_VERIFY_TIME: Final = "spec.verify_time_s"
SPEC_LOSSLESS: Final = "spec.lossless"
