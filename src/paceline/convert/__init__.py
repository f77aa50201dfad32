"""Conversion of draft heads and models to and from the formats of other engines.

export               a trained head in the speculators format
import_head          a published checkpoint as a drafter's folder
foreign_checkpoint   records and files of other formats
speculators          the speculators format: parts that its heads share
dspark               block heads as DSpark
eagle3               EAGLE-3 heads, in the speculators format and as published
medusa               Medusa heads as published
hf_model             models as Hugging Face folders
onnx_decoder         models as ONNX files, for onnxruntime and browsers
"""

from paceline.convert.export import METHODS, export
from paceline.convert.hf_model import export_model
from paceline.convert.import_head import import_
from paceline.convert.onnx_decoder import export_onnx

__all__ = ["METHODS", "export", "export_model", "export_onnx", "import_"]
