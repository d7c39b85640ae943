"""Any architecture of Hugging Face ``transformers``, as it is, behind the face of the other models.

The folder of ``model.hf_assets_path`` says which: its config.json names a class of the installed ``transformers``. The
network is theirs, its names too (with ``hf.`` before them); sharding, recomputation and compiling go by the blocks
that it repeats, tensor parallelism by the plan that it has. Nothing that lies in the folder is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.layout import Draw, Layout
from shardtrain.models import architecture as architectures
from shardtrain.ops.targets import IGNORE
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError, Problem

AS_IS = True
"""Its layout is found and not promised, and weights keep the names that they have in ``transformers``."""
PREFIX = "hf."
_LAYERS = ("encoder_layers", "decoder_layers", "num_hidden_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Config:
    """What is built.

    ``path`` is the folder with config.json (that of ``model.hf_assets_path`` unless set); ``architecture`` the class
    of ``transformers``, unless it is the one that config.json names; ``attention`` its implementation, "sdpa" or
    "eager", or "auto", which leaves the choice to it; ``dropout`` drops at the rates of config.json, which by default
    nothing does; ``num_labels`` are the labels of a network that classifies, unless they are those of config.json;
    ``vocab_size`` the rows of the embedding, which are those of config.json unless set.
    """

    path: str = ""
    architecture: str = ""
    attention: str = "auto"
    dropout: bool = False
    num_labels: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.path and self.vocab_size is None:
            object.__setattr__(self, "vocab_size", self.own_vocab_size)

    @property
    def own_vocab_size(self) -> int:
        """Rows of the embedding that config.json says."""
        return int(getattr(self._text, "vocab_size", 0) or 0)

    @property
    def num_layers(self) -> int:
        """Blocks of a decoder, or of encoder and decoder together."""
        values = {name: getattr(self._text, name, None) for name in _LAYERS}
        counts = {name: count for name, count in values.items() if isinstance(count, int)}
        # BART has both names for its encoder: num_hidden_layers repeats encoder_layers
        if {"encoder_layers", "decoder_layers"} <= counts.keys():
            return counts["encoder_layers"] + counts["decoder_layers"]
        return counts.get("num_hidden_layers", 0) + counts.get("num_decoder_layers", 0)

    @property
    def num_heads(self) -> int:
        """Heads of attention."""
        return int(getattr(self._text, "num_attention_heads", 0) or 0)

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        head_dim = getattr(self._text, "head_dim", None)
        return int(head_dim or getattr(self._text, "hidden_size", 0) // max(1, self.num_heads))

    @property
    def tied_embeddings(self) -> bool:
        """Whether head and embedding are one tensor."""
        return bool(getattr(self._text, "tie_word_embeddings", False))

    @property
    def class_name(self) -> str:
        """The class of ``transformers`` that is built."""
        return architectures.architecture_of(self.path, self.architecture)

    @property
    def _text(self) -> Any:
        return architectures.read(self.path).get_text_config()


LAYOUT = Layout(first=("embedding",), layers="blocks", last=("head",))
"""The same for all: ``Model`` finds what these names mean in the network at hand."""

FLAVORS: dict[str, dict[str, Any]] = {"debugmodel": {}, "folder": {}}
"""The folder says the sizes; the first name is the default of ``model.flavor``."""


class Model(nn.Module):
    """A network of ``transformers``; its parameters are on the meta device, whatever the default device is."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        built = architectures.build(c.path, c.class_name, c.attention, c.num_labels, c.vocab_size or 0)
        self.hf = built.module
        self.config_name = c.class_name
        self.kind = architectures.kind_of(c.path, c.class_name)
        self.blocks = dict(_blocks(self.hf))
        """Path -> repeated block: the unit of sharding, recomputation and compiling."""
        self.draws = {PREFIX + name: draw for name, draw in built.draws.items()}
        self._drops = c.dropout
        self.train()
        self._constants = _take_constants(self.hf, c)
        paths = {module: path for path, module in self.hf.named_modules()}
        self.computed = [f"{paths[owner]}.{name}" for owner, name in self._constants]
        """Names of what follows from config.json, which files of older versions hold."""
        self._shared = {name for names in tied_names(self.hf) for name in names}
        if not self.blocks:
            rule = f"names {c.class_name}, in which no repeated blocks are found"
            raise ConfigError(Problem("model.overrides.path", c.path, rule, "write a model file for it"))

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        lengths_B: Tensor | None = None,
        decoded_BS: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of tokens (B, T); (B, L) of a network that classifies.

        Each token's place is its column; with ``documents_BT`` it is that of ``positions_BT``, which begin again at 0
        with each document, and by which the network knows where documents begin. Where
        ``lengths_B`` are given, what comes after them is padding, which no token sees. ``decoded_BS`` are the tokens
        that a decoder is to predict, and the logits are (B, S, V): they are shifted right here, and IGNORE becomes
        padding.
        """
        self._follow(tokens_BT.device)
        config = self.hf.config
        inputs = {"input_ids": tokens_BT}
        pad = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
        if documents_BT is not None:
            # No attention mask: positions that begin again say where documents do
            assert positions_BT is not None
            inputs["position_ids"] = positions_BT
        if lengths_B is not None:
            known_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device) < lengths_B[:, None]
            inputs = {"input_ids": tokens_BT.masked_fill(~known_BT, pad), "attention_mask": known_BT.long()}
        if decoded_BS is not None:
            shown_BS = torch.full_like(decoded_BS, config.decoder_start_token_id)
            shown_BS[:, 1:] = decoded_BS[:, :-1].masked_fill(decoded_BS[:, :-1] == IGNORE, pad)
            inputs["decoder_input_ids"] = shown_BS
        return self.hf(**inputs).logits  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Model:
        """As ever, but the network itself drops nothing unless it was asked for."""
        super().train(mode)
        self.hf.train(mode and self._drops)
        return self

    @property
    def embedding(self) -> nn.Module:
        """The input embedding, or nothing where it is also another module's: the root then holds it."""
        return self._end(self.hf.get_input_embeddings())

    @property
    def head(self) -> nn.Module:
        """The module that gives logits, or nothing where its weights are also another module's."""
        return self._end(self.hf.get_output_embeddings())

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Module path -> word of the network's own plan for tensor parallelism; empty where it has none."""
        # In some versions the instance has the plan of its blocks alone, and the class that of the head
        plan = {**(getattr(type(self.hf), "_tp_plan", None) or {}), **(getattr(self.hf, "_tp_plan", None) or {})}
        return {PREFIX + pattern: word for pattern, word in plan.items()}

    def _end(self, module: nn.Module | None) -> nn.Module:
        path = next((path for path, found in self.hf.named_modules() if found is module), "")
        is_shared = any(name.rpartition(".")[0] == path for name in self._shared)
        return nn.Identity() if module is None or is_shared else module

    def _follow(self, device: torch.device) -> None:
        """Move what the network has computed from its config to where the tokens are."""
        for owner, name in self._constants:
            value = owner.__dict__[name]
            if value.device != device:
                owner.__dict__[name] = value.to(device)


def initial(c: Config) -> dict[str, Draw]:
    """How each parameter starts, by its name: as the architecture's own ``_init_weights`` says."""
    return Model(c).draws


def _blocks(hf: Any) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of modules: of those that ``_no_split_modules`` names, where it names any of them."""
    words = set(getattr(hf, "_no_split_modules", None) or ())
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, module in hf.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and not inside and any(True for _ in module.parameters()):
            lists.append((path, module))
    named = [(path, blocks) for path, blocks in lists if words & {type(block).__name__ for block in blocks}]
    for path, blocks in named or lists:
        for index, block in enumerate(blocks):
            yield f"{PREFIX}{path}.{index}", block


def _take_constants(hf: nn.Module, c: Config) -> list[tuple[nn.Module, str]]:
    """Make plain attributes of buffers that are not saved: no cast and no ``to_empty`` then changes them."""
    taken = []
    for path, module in hf.named_modules():
        for name, value in list(module._buffers.items()):
            if value is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.discard(name)
                del module._buffers[name]
                module.__dict__[name] = value
                taken.append((module, name))
            elif bool(value.any()):
                # A buffer that is saved is drawn as zeros: one that starts at another value would be lost
                rule = f"names {c.class_name}, whose buffer {path}.{name} starts at a value of its own"
                raise ConfigError(Problem("model.overrides.path", c.path, rule, "write a model file for it"))
    return taken
