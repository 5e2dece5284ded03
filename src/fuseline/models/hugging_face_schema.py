"""What a `config.json`, a `generation_config.json` and an index of Hugging Face's format may say.

Values are taken strictly, and sizes have bounds: a file that says 1.5 heads, a negative width or a billion
positions is refused by name before a model is made of it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Optional, Union

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

LARGEST = 2**24
"""Of a width, a vocabulary or a context: several times what any model has."""
MOST_LAYERS = 4096

Size = Annotated[int, Field(ge=1, le=LARGEST)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Factor = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, le=2**31)]


class _Said(BaseModel):
    """Fields that are not named here are no matter of ours."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class GPT2Said(_Said):
    n_layer: Layers
    n_head: Size
    n_embd: Size
    n_positions: Size
    vocab_size: Size
    n_inner: Optional[Size] = None
    activation_function: Annotated[str, Field(max_length=200)] = "gelu_new"


class RopeSaid(_Said):
    """Rotary positions: `rope_parameters`, or `rope_scaling` before transformers 5."""

    rope_type: Annotated[str, Field(validation_alias=AliasChoices("rope_type", "type"))] = "default"
    rope_theta: Optional[Factor] = None
    factor: Optional[Factor] = None
    low_freq_factor: Optional[Factor] = None
    high_freq_factor: Optional[Factor] = None
    original_max_position_embeddings: Optional[Size] = None

    @model_validator(mode="after")
    def _complete(self) -> RopeSaid:
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        if self.rope_type not in needed:
            raise ValueError(f"{self.rope_type[:60]!r} is not one of {', '.join(needed)}.")
        for name in needed[self.rope_type]:
            if getattr(self, name) is None:
                raise ValueError(f"scaling {self.rope_type!r} lacks {name}.")
        return self


class LlamaSaid(_Said):
    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    max_position_embeddings: Size
    vocab_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    hidden_size: Size
    intermediate_size: Size
    num_key_value_heads: Optional[Size] = None
    head_dim: Optional[Size] = None
    rope_theta: Optional[Factor] = None
    rope_parameters: Optional[RopeSaid] = None
    rope_scaling: Optional[RopeSaid] = None
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: Optional[bool] = None
    mlp_bias: Optional[bool] = None
    tie_word_embeddings: Optional[bool] = None
    use_sliding_window: Optional[bool] = None
    sliding_window: Optional[Size] = None
    max_window_layers: Optional[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] = None
    layer_types: Optional[Annotated[list[str], Field(max_length=MOST_LAYERS)]] = None


class EndsSaid(_Said):
    """The ids that end a text; of a config, or of a generation's."""

    eos_token_id: Union[Token, Annotated[list[Token], Field(max_length=1000)], None] = None

    @property
    def ids(self) -> tuple[int, ...]:
        said = self.eos_token_id
        return () if said is None else (said,) if isinstance(said, int) else tuple(said)


class IndexSaid(_Said):
    """Which file of a sharded model holds which weight."""

    weight_map: dict[str, Annotated[str, Field(min_length=1, max_length=255)]]
