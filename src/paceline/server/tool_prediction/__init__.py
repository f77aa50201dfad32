"""Predicted tool calls: what an answer will call, before it is written.

conversation.py          a chat's messages: past calls, and the places that values can come from
logistic_regression.py   logistic regression over hashed features, in a table of fixed size
predictor.py             ToolCallPredictor: the memory of one tenant; predicts calls, learns from answers
predictor_files.py       predictors on the disk
tool_predictions.py      ToolPredictions: predictors by tenant, in one thread; ToolPrediction: of one request
"""

from paceline.server.tool_prediction.predictor_files import PredictorFiles
from paceline.server.tool_prediction.tool_predictions import (
    PredictionRequest,
    ToolPrediction,
    ToolPredictions,
    predicted_field,
)

__all__ = ["PredictionRequest", "PredictorFiles", "ToolPrediction", "ToolPredictions", "predicted_field"]
