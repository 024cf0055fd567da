"""Text encoders of Hugging Face's transformers as backbones."""

import os
import socket
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from torch import Tensor, nn

from fastgnl.errors import InputError, check, check_choice

Pooling = Literal["auto", "cls", "mean"]


class TextEncoder(nn.Module):
    """Token ids [B, T] to one vector a text: that of the first token, or the mean over the text's tokens.

    A mean is brought to mean 0 and variance 1 over its features, as the encoder's last layer leaves each token's: the
    mean's own are ten times smaller (MiniLM), and a new head on them hardly learns at an encoder's learning rate."""

    def __init__(self, model: Any, pad: int, pooling: Literal["cls", "mean"]) -> None:
        super().__init__()
        self.model, self.pad, self.pooling = model, pad, pooling
        self.num_features = int(model.config.hidden_size)
        # A head of the model's own that is not asked would have no gradient, which DDP waits for.
        if getattr(model, "pooler", None) is not None:
            model.pooler = None

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != self.pad).long()
        hidden_BTF = self.model(input_ids=x, attention_mask=mask).last_hidden_state
        if self.pooling == "cls":
            return hidden_BTF[:, 0]
        weight = mask[..., None].to(hidden_BTF.dtype)
        mean_BF = (hidden_BTF * weight).sum(1) / weight.sum(1).clamp(min=1)
        return nn.functional.layer_norm(mean_BF, mean_BF.shape[1:])


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError("transformers is not installed, wanted it for texts: pip install 'fastgnl[nlp]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _reachable() -> bool:
    """Whether the model hub can be: its client would try again for most of a minute."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return not os.environ.get("HF_HUB_OFFLINE")


def _fetched(kind: Any, encoder: str, **options: Any) -> Any:
    """``kind.from_pretrained(encoder)``: from a folder, from what was fetched before, or from the hub."""
    folder = Path(encoder).is_dir()
    wanted = "the folder of a local model (with config.json, tokenizer.json and model.safetensors), or 'embeddings'"
    for local in (True, False):
        if not local and (folder or not _reachable()):
            break
        try:
            return kind.from_pretrained(encoder, local_files_only=local, **options)
        except (OSError, ValueError, KeyError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
    if folder:
        raise InputError(f"encoder is the folder {encoder}, which cannot be loaded ({why}), wanted {wanted}")
    raise InputError(f"encoder is {encoder!r}, which is no folder, and no model hub can be reached, wanted {wanted}")


def load_tokenizer(encoder: str) -> Any:
    """The tokenizer of a model's folder or name."""
    return _fetched(_transformers().AutoTokenizer, encoder)


def load_encoder(encoder: str, pooling: Pooling = "auto", weights: bool = True) -> TextEncoder:
    """The model of a folder or name, with its trained ``weights`` or new ones. ``pooling`` "auto" is the mean where the
    folder is a sentence-transformers model (which takes the mean), else the first token."""
    check_choice("pooling", pooling, get_args(Pooling))
    transformers = _transformers()
    if pooling == "auto":
        pooling = "mean" if (Path(encoder) / "1_Pooling").is_dir() else "cls"
    config = _fetched(transformers.AutoConfig, encoder)
    check(
        hasattr(config, "hidden_size"), f"encoder {encoder} is a {config.model_type} without a hidden_size, wanted one"
    )
    model = (
        _fetched(transformers.AutoModel, encoder, dtype="float32")
        if weights
        else transformers.AutoModel.from_config(config)
    )
    pad = config.pad_token_id
    return TextEncoder(model, 0 if pad is None else int(pad), pooling)
