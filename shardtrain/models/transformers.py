"""Adapter that gives any Hugging Face ``transformers`` architecture the interface of the native models.

The config.json in the folder of ``model.hf_assets_path`` names a class of the installed
``transformers``. Parameters keep the class's own names, with the prefix ``hf.``. Its repeated
blocks are the units of sharding, recomputation and compiling; tensor parallelism uses the plan of
the class (``_tp_plan``). No code of the folder runs.
Shape suffixes: B batch, T tokens, S tokens of the decoder, L labels, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.layout import Draw, Layout
from shardtrain.models import architecture as architectures
from shardtrain.models import balance_loss, expert_parameters, experts_interface
from shardtrain.ops.targets import IGNORE
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

AS_IS = True
"""The layout is derived from each model instead of declared, and weights keep their names in
``transformers``.
"""
PREFIX = "hf."
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
"""Names of that field in configs."""
_LAYERS = ("encoder_layers", "decoder_layers", "num_hidden_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Config:
    """Options of a transformers model. The sizes are in config.json.

    Attributes:
        path: folder with the config.json; defaults to ``model.hf_assets_path``.
        architecture: class of ``transformers``; defaults to the one that config.json names.
        attention: attention implementation, "sdpa" or "eager"; "auto" uses the default of the class.
        dropout: train with the dropout rates of config.json. By default there is no dropout.
        num_labels: labels of a classifier; 0 uses the number in config.json.
        vocab_size: rows of the embedding; None uses the number in config.json.
        balance_loss_coeff: weight of the balance loss of experts; 0 means none. None uses the
            network's own coefficient if config.json has ``output_router_logits``.
    """

    path: str = ""
    architecture: str = ""
    attention: str = "auto"
    dropout: bool = False
    num_labels: int = 0
    vocab_size: int | None = None
    balance_loss_coeff: float | None = None

    def __post_init__(self) -> None:
        if self.path and self.vocab_size is None:
            object.__setattr__(self, "vocab_size", self.own_vocab_size)

    @property
    def own_vocab_size(self) -> int:
        """Rows of the embedding according to config.json; 0 if it does not specify them."""
        return int(getattr(self._text, "vocab_size", 0) or 0)

    @property
    def num_layers(self) -> int:
        """Number of blocks: of a decoder, or of encoder and decoder together."""
        counts = {}
        for name in _LAYERS:
            count = getattr(self._text, name, None)
            if isinstance(count, int):
                counts[name] = count
        # BART has both: num_hidden_layers equals encoder_layers and must not be counted again
        if {"encoder_layers", "decoder_layers"} <= counts.keys():
            return counts["encoder_layers"] + counts["decoder_layers"]
        return counts.get("num_hidden_layers", 0) + counts.get("num_decoder_layers", 0)

    @property
    def num_heads(self) -> int:
        """Number of attention heads."""
        return self._largest("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Features per attention head. The largest number if layers differ, as in Gemma 4.

        Latent attention has heads of two sizes, and this is their mean.
        """
        if self.v_head_dim and self.qk_nope_head_dim:
            return (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim) // 2
        head_dim = self._largest("head_dim")
        if head_dim:
            return head_dim
        return int(getattr(self._text, "hidden_size", 0) // max(1, self.num_heads))

    @property
    def dim(self) -> int:
        """Features of the residual stream."""
        return self._largest("hidden_size")

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self._largest("num_key_value_heads") or self.num_heads

    @property
    def qk_nope_head_dim(self) -> int:
        """Features of queries and keys without rotary positions, in latent attention. Otherwise 0."""
        return self._largest("qk_nope_head_dim")

    @property
    def qk_rope_head_dim(self) -> int:
        """Features of queries and keys with rotary positions, in latent attention. Otherwise 0."""
        return self._largest("qk_rope_head_dim")

    @property
    def v_head_dim(self) -> int:
        """Features of a value, in latent attention. Otherwise 0."""
        return self._largest("v_head_dim")

    @property
    def attention_reaches(self) -> list[float]:
        """Largest number of tokens that a token attends to, for each layer; 0 in a layer without attention."""
        config = self._text
        window = getattr(config, "sliding_window", None) or math.inf
        chunk = getattr(config, "attention_chunk_size", None) or math.inf
        kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
        # Without a list of layers, all layers are equal.
        if not kinds or len(kinds) != self.num_layers:
            has_window = getattr(config, "use_sliding_window", True)
            return [window if has_window else math.inf] * self.num_layers
        reaches: list[float] = []
        for kind in kinds:
            if "sliding" in kind:
                reaches.append(window)
            elif "chunked" in kind:
                reaches.append(chunk)
            elif kind == "hybrid" or ("attention" in kind and "linear" not in kind):
                reaches.append(math.inf)
            else:
                reaches.append(0)
        return reaches

    @property
    def top_k(self) -> int:
        """Experts per token. 1 if the network has no experts."""
        return max(self._largest(name) for name in EXPERTS_PER_TOKEN) or 1

    @property
    def tied_embeddings(self) -> bool:
        """True if head and embedding share one tensor."""
        return bool(getattr(self._text, "tie_word_embeddings", False))

    @property
    def class_name(self) -> str:
        """Name of the ``transformers`` class to build."""
        return architectures.architecture_of(self.path, self.architecture)

    @property
    def _text(self) -> Any:
        return architectures.read(self.path).get_text_config()

    def _largest(self, name: str) -> int:
        """Return a size of the config, or its maximum over layers. 0 if it does not exist."""
        # transformers raises an error for the global value if layers differ.
        # Older versions have no such configs.
        layers = getattr(self._text, "per_layer_config", None)
        configs = list(layers.values()) if isinstance(layers, dict) else list(layers or ())
        sizes = [0]
        for config in configs or [self._text]:
            value = getattr(config, name, 0) or 0
            # A list contains one size for each layer.
            sizes += map(int, value if isinstance(value, list | tuple) else [value])
        return max(sizes)


LAYOUT = Layout(first=("embedding",), layers="blocks", last=("head",))
"""Attributes of ``Model``, which finds the corresponding modules in each architecture."""

FLAVORS: dict[str, dict[str, Any]] = {"debugmodel": {}, "folder": {}}
"""Both flavors are empty, because config.json determines the sizes. The first is the default of ``model.flavor``."""


class Model(nn.Module):
    """A model of ``transformers``, with parameters on the meta device regardless of the default device.

    Raises:
        ConfigError: the class cannot be built, has no repeated blocks, or has a saved buffer that
            is not zeros.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        built = architectures.build(
            c.path, c.class_name, c.attention, c.num_labels, c.vocab_size or 0
        )
        self.hf = built.module
        self._path = c.path
        self.config_name = c.class_name
        self.kind = architectures.kind_of(c.path, c.class_name)
        self.blocks = {**self.tower_blocks, **dict(_blocks(self.hf))}
        """Path -> repeated block, the unit of sharding, recomputation and compiling."""
        self.draws = {PREFIX + name: draw for name, draw in built.draws.items()}
        self.balance = balance_loss.find(
            self.hf, c.path, built.asks_for_balance, c.balance_loss_coeff
        )
        """The balance loss of the experts, which ``distributed.hf_balance`` attaches; or None."""
        self.passes_positions = False
        """True if positions are passed even without documents, because each row is only part of a sequence."""
        self._drops = c.dropout
        if c.dropout:
            _warn_without_dropout(self.hf.config, c)
        self.train()
        # initial_buffers maps names to the values of saved buffers that do not start at zero
        self._constants, self.initial_buffers = _take_constants(self.hf, c)
        paths = {module: path for path, module in self.hf.named_modules()}
        self.computed = [f"{paths[owner]}.{name}" for owner, name in self._constants]
        """Names of the buffers that follow from config.json. Checkpoints of older versions may
        contain them.
        """
        self._tied = set(itertools.chain.from_iterable(tied_names(self.hf)))
        if not self.blocks:
            rule = f"names {c.class_name}, in which no repeated blocks are found"
            raise ConfigError(
                Problem("model.overrides.path", c.path, rule, "write a model file for it")
            )
        for path in _sharing_blocks(self.hf, self.blocks):
            # Shard these with the root. If two FSDP units shared a parameter, each would shard its own
            # copy of it.
            del self.blocks[path]

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        lengths_B: Tensor | None = None,
        decoded_BS: Tensor | None = None,
        documents_BT: Tensor | None = None,
        images: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) of tokens (B, T), or (B, L) for a classifier.

        Args:
            tokens_BT: token ids.
            positions_BT: positions that restart at 0 with each document. Used only with
                ``documents_BT`` or ``passes_positions``; else the position of a token is its column.
            lengths_B: number of tokens of each row. The rest of the row is padding, which is
                masked.
            decoded_BS: target tokens of an encoder-decoder, which then returns logits (B, S, V).
                This method shifts them right and replaces IGNORE by the padding token.
            documents_BT: document number of each token. Tokens attend within their document.
            images: further inputs of a network that reads images, by their names in ``transformers``.
        """
        self._move_constants(tokens_BT.device)
        if self.balance is not None:
            self.balance.mark_filler(documents_BT)
        config = self.hf.config
        # later pipeline stages receive activations
        inputs = {"inputs_embeds" if tokens_BT.is_floating_point() else "input_ids": tokens_BT}
        # The config of a model with several parts, such as a vision tower, has none
        pad_token_id = getattr(config, "pad_token_id", None)
        pad = pad_token_id if isinstance(pad_token_id, int) else 0
        if documents_BT is not None or self.passes_positions:
            # No attention mask is passed: transformers finds documents by the positions that restart at 0
            assert positions_BT is not None
            inputs["position_ids"] = positions_BT
        if lengths_B is not None:
            is_text_BT = (
                torch.arange(tokens_BT.size(1), device=tokens_BT.device) < lengths_B[:, None]
            )
            inputs = {
                "input_ids": tokens_BT.masked_fill(~is_text_BT, pad),
                "attention_mask": is_text_BT.long(),
            }
        if decoded_BS is not None:
            shifted_BS = torch.full_like(decoded_BS, config.decoder_start_token_id)
            shifted_BS[:, 1:] = decoded_BS[:, :-1].masked_fill(decoded_BS[:, :-1] == IGNORE, pad)
            inputs["decoder_input_ids"] = shifted_BS
        if images is not None:
            inputs |= images
        return self.hf(**inputs).logits  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Model:
        """Set the mode as usual, but keep the network in evaluation mode, without dropout, unless
        ``dropout`` is set.
        """
        super().train(mode)
        self.hf.train(mode and self._drops)
        return self

    @property
    def embedding(self) -> nn.Module:
        """The input embedding, or an ``nn.Identity`` if its weight is tied, since the root module
        then shards it.
        """
        return self._end(self.hf.get_input_embeddings())

    @property
    def head(self) -> nn.Module:
        """The output layer, or an ``nn.Identity`` if its weight is tied."""
        return self._end(self.hf.get_output_embeddings())

    @property
    def image_modules(self) -> dict[str, nn.Module]:
        """Path -> largest modules with parameters outside of the language model, such as a vision tower.

        Empty for a network that does not read images.
        """
        if not architectures.reads_images(self._path, self.config_name):
            return {}
        text = self.hf.get_decoder()
        ends = (self.hf.get_input_embeddings(), self.hf.get_output_embeddings())
        text_modules = {text, *(end for end in ends if end is not None)}
        modules: dict[str, nn.Module] = {}
        waiting = [("hf", self.hf)]
        while waiting:
            path, module = waiting.pop()
            if module in text_modules or next(module.parameters(), None) is None:
                continue
            # A module that contains a part of the language model is divided further.
            if text_modules.isdisjoint(module.modules()):
                modules[path] = module
            else:
                waiting += [(f"{path}.{name}", child) for name, child in module.named_children()]
        return modules

    @property
    def tower_blocks(self) -> dict[str, nn.Module]:
        """Path -> repeated block of the vision tower: the items of its largest module list."""
        lists = []
        for path, module in self.image_modules.items():
            for name, child in module.named_modules(prefix=path):
                if isinstance(child, nn.ModuleList):
                    lists.append(
                        (sum(weight.numel() for weight in child.parameters()), name, child)
                    )
        if not lists:
            return {}
        _, path, blocks = max(lists, key=lambda found: found[0])
        return {f"{path}.{index}": block for index, block in enumerate(blocks)}

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Module path -> tensor-parallel style, from the ``_tp_plan`` of the architecture; empty if
        it has none.
        """
        # In some versions of transformers the instance only has the plan for its blocks, and the class
        # has the plan for the head.
        class_plan = getattr(type(self.hf), "_tp_plan", None) or {}
        instance_plan = getattr(self.hf, "_tp_plan", None) or {}
        plan = {**class_plan, **instance_plan}
        return {PREFIX + pattern: style for pattern, style in plan.items()}

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Path -> stacked experts that the experts interface of ``transformers`` runs."""
        return {
            path: module
            for path, module in self.named_modules()
            if experts_interface.is_experts(module)
        }

    @staticmethod
    def compute_experts(experts: nn.Module, x_RD: Tensor, count_E: Tensor) -> Tensor:
        """Return the outputs of rows that are sorted by expert; see ``experts_interface.compute``."""
        return experts_interface.compute(experts, x_RD, count_E)

    def idle_expert_numel(self, top_k: int, only_trained: bool = False) -> int:
        """Return the number of expert weights that a token does not use."""
        return expert_parameters.idle_numel(self.hf, top_k, only_trained)

    def _end(self, module: nn.Module | None) -> nn.Module:
        """Return an embedding or head, or an ``nn.Identity`` if the architecture has none or its
        weight is tied.
        """
        if module is None:
            return nn.Identity()
        path = next((path for path, other in self.hf.named_modules() if other is module), "")
        is_tied = any(name.rpartition(".")[0] == path for name in self._tied)
        return nn.Identity() if is_tied else module

    def _move_constants(self, device: torch.device) -> None:
        """Move the buffers that became plain attributes to the device of the tokens."""
        for owner, name in self._constants:
            value = owner.__dict__[name]
            if value.device != device:
                owner.__dict__[name] = value.to(device)


_warned: set[str] = set()
"""Folders without dropout of which a warning was logged."""


def _warn_without_dropout(hf_config: Any, c: Config) -> None:
    """Log a warning, once per folder, if all dropout rates of a network are zero."""
    rates = dict(_dropout_rates(hf_config.to_dict()))
    if any(rates.values()) or c.path in _warned:
        return
    _warned.add(c.path)
    names = ", ".join(rates) or "none"
    logger.warning(
        f"model.overrides.dropout=true has no effect: all dropout rates of {c.class_name} are 0 ({names}); "
        "set them in config.json, or remove the option"
    )


def _dropout_rates(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of dropout rates, also in the parts of a config with several models.

    >>> dict(_dropout_rates({"attn_pdrop": 0.1, "text_config": {"attention_dropout": 0.0}, "token_dropout": True}))
    {'attn_pdrop': 0.1, 'attention_dropout': 0.0}
    """
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _dropout_rates(value)
        elif "drop" in str(key) and type(value) in (int, float):
            yield key, value


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution of each parameter by name, from the architecture's own
    ``_init_weights``.
    """
    return Model(c).draws


def _blocks(hf: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the repeated blocks: the items of the outermost module lists with parameters.

    If ``_no_split_modules`` names classes of some lists, only these lists count.
    """
    block_classes = set(getattr(hf, "_no_split_modules", None) or ())
    lists: list[tuple[str, nn.ModuleList]] = []
    named_lists: list[tuple[str, nn.ModuleList]] = []
    for path, module in hf.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        is_nested = any(path.startswith(f"{outer}.") for outer, _ in lists)
        has_parameters = next(module.parameters(), None) is not None
        if is_nested or not has_parameters:
            continue
        lists.append((path, module))
        if block_classes & {type(block).__name__ for block in module}:
            named_lists.append((path, module))

    for path, blocks in named_lists or lists:
        for index, block in enumerate(blocks):
            yield f"{PREFIX}{path}.{index}", block


def _sharing_blocks(hf: nn.Module, blocks: Iterable[str]) -> set[str]:
    """Return the paths of blocks that have a parameter of another block, as in Zamba 2."""
    sharing: set[str] = set()
    for names in tied_names(hf):
        owners = set()
        for block in blocks:
            if any(f"{PREFIX}{name}".startswith(f"{block}.") for name in names):
                owners.add(block)
        if len(owners) > 1:
            sharing |= owners
    return sharing


def _take_constants(
    hf: nn.Module, c: Config
) -> tuple[list[tuple[nn.Module, str]], dict[str, Tensor]]:
    """Turn buffers that follow from config.json into plain attributes,
    which no cast and no ``to_empty`` changes.

    These are the non-persistent buffers, and the buffers that ``_init_weights`` sets to their value.
    Saved numbers, such as those of an activation function, remain buffers.

    Returns:
        The modules and names of the plain attributes, and the initial values of the saved numbers.

    Raises:
        ConfigError: any other buffer does not start at zero.
    """
    taken = []
    initial = {}
    for path, module in hf.named_modules():
        for name, value in list(module._buffers.items()):
            if value is None:
                continue
            is_persistent = name not in module._non_persistent_buffers_set
            # All other persistent buffers are initialized to zeros
            if is_persistent and not bool(value.any()):
                continue
            if not is_persistent or architectures.follows_from_config(hf, path, name):
                # Module.__setattr__ is bypassed, because it would register the tensor as a buffer again
                module._non_persistent_buffers_set.discard(name)
                del module._buffers[name]
                # ``detach``, because assigning an ``nn.Buffer`` in forward would register it, too, as in CTRL.
                module.__dict__[name] = value.detach()
                taken.append((module, name))
            elif value.dim() == 0:
                # The constructor sets it, for example the exponents of an activation function of Apertus.
                initial[f"{PREFIX}{path}.{name}"] = value.clone()
            else:
                rule = f"names {c.class_name}, whose buffer {path}.{name} does not start at zero"
                raise ConfigError(
                    Problem("model.overrides.path", c.path, rule, "write a model file for it")
                )
    return taken, initial
