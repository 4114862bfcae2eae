"""The networks and their loaders. `load_model` is the way in; the rest is for tests and new families."""

from models.assembly import LoadProgress
from models.chat_prompt import encode_messages
from models.chat_template import ChatTemplate, ChatTemplateError
from models.checkpoint import CheckpointError
from models.config import ModelConfigError, UnsupportedModelError
from models.context import ContextError
from models.decoder import Forward
from models.generation import GenerationDefaults
from models.loader import LoadedModel, load_model
from models.stream_decoder import StreamDecoder
from models.tokenizer import Tokenizer, TokenizerError

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "CheckpointError",
    "ContextError",
    "Forward",
    "GenerationDefaults",
    "LoadProgress",
    "LoadedModel",
    "ModelConfigError",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedModelError",
    "encode_messages",
    "load_model",
]
