"""The 40 architectures of `transformers` on which acceleration is judged, as data.

They were chosen to be different: 21 decoders (11 of them after LLaMA's pattern), 7 encoders, 3 models of an
encoder and a decoder, 6 of images and 3 of sound. Weights are small and random; nothing is downloaded.
"""

from __future__ import annotations

from .decoders import DECODERS
from .encoders import ENCODER_DECODERS, ENCODERS
from .llama_like import LLAMA_LIKE
from .vision_and_speech import SPEECH, VISION

TRANSFORMERS_MODELS = (*LLAMA_LIKE, *DECODERS, *ENCODERS, *ENCODER_DECODERS, *VISION, *SPEECH)

QUICK = ("llama", "gemma2", "gpt2", "phi", "bert", "t5", "vit", "whisper")
"""One of each kind, for everyday runs; `make test-full` takes all."""
