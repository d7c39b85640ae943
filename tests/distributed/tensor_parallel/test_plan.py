"""Tensor parallelism: each style of the layout splits its weight as defined, and logits do not change."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import SHAPE, tiny_config
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardtrain.distributed import build
from shardtrain.distributed.cpu import mapped_memory, shared_barrier
from shardtrain.distributed.process_group import World
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.distributed.tensor_parallel.plan import Splitting, style_for
from shardtrain.distributed.tensor_parallel.sequences import SequenceLength, Sequences
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.layout import Layout
from shardtrain.models import find, shape_of
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError

PLACEMENTS = {
    "embed": Shard(0),
    "norm": Replicate(),
    "attn_norm": Replicate(),
    "ffn_norm": Replicate(),
    "wq": Shard(0),
    "wk": Shard(0),
    "wv": Shard(0),
    "wo": Shard(1),
    "w1": Shard(0),
    "w2": Shard(1),
    "w3": Shard(0),
    "head": Shard(0),
}


def _model(tied: bool = False) -> tuple[Any, torch.nn.Module]:
    module = find("llama3")
    torch.manual_seed(0)
    return module, module.Model(
        shape_of(module, "debugmodel", {**SHAPE, "tied_embeddings": tied}, "rmsnorm")
    )


def _split(
    rank: int, size: int, whole_logits: bool = False, tied: bool = False
) -> tuple[Any, torch.nn.Module, Any]:
    options = {"tensor_parallel_degree": size, "disable_loss_parallel": whole_logits}
    config = tiny_config(parallelism=options)
    mesh = build(config, World(rank, size, rank, torch.device("cpu")))
    module, model = _model(tied)
    tensor_parallel.apply(model, module.LAYOUT, mesh, config)
    return module, model, mesh


def _check(rank: int) -> None:
    tokens = torch.arange(24).view(2, 12) * 7
    positions = torch.arange(12).expand(2, -1)
    expected = _model()[1](tokens, positions)
    for whole_logits in (False, True):
        _, model, mesh = _split(rank, 2, whole_logits)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            module_name = name.split(".")[-2]
            assert parameter.placements == (PLACEMENTS[module_name],), name

        # Note the shapes of the inputs of these modules on this rank.
        shapes: dict[str, tuple[int, ...]] = {}

        def note_shape(path: str, shapes: dict, _: Any, inputs: Any, __: Any) -> None:
            shapes[path] = tuple(local_tensor(inputs[0]).shape)

        for path in (
            "layers.0.attn_norm",
            "layers.0.attn.wq",
            "layers.0.attn.core",
            "layers.0.ffn.w2",
            "norm",
        ):
            hook = partial(note_shape, path, shapes)
            model.get_submodule(path).register_forward_hook(hook)

        logits = model(tokens, positions)
        vocabulary = slice(None) if whole_logits else slice(256 * rank, 256 * rank + 256)
        # float32 rounding: row-parallel products sum in another order
        torch.testing.assert_close(logits, expected[..., vocabulary], atol=1e-5, rtol=1e-5)
        # norms get half of the sequence, the attention core half of the heads
        assert shapes["layers.0.attn_norm"] == shapes["norm"] == (2, 6, 64)
        assert shapes["layers.0.attn.core"] == (2, 12, 2, 16)
        logits.sum().backward()

    assert _vocabularies(mesh) == ([0, 256][rank], 256)
    _check_tied(rank)


def _vocabularies(mesh) -> tuple[int, int]:
    tp_rank = mesh.rank("tp")
    vocabulary = SplitVocabulary(mesh, 512)
    largest = vocabulary.max(torch.tensor([float(tp_rank), -5.0]))
    assert largest.tolist() == [1.0, -5.0]
    assert vocabulary.sum(torch.tensor([1.0, tp_rank + 1.0])).tolist() == [2.0, 3.0]
    assert vocabulary.gather(torch.tensor([tp_rank, 5])).tolist() == [[0, 5], [1, 5]]
    assert SplitVocabulary(mesh, 7).offset == 4 * tp_rank  # 4 and 3, like torch.chunk
    return vocabulary.offset, vocabulary.columns


def _assert_equal_gradients(
    split: torch.nn.Module, unsplit: torch.nn.Module, factor: int = 1
) -> None:
    """The gradients of the split module are ``factor`` times those of the unsplit one."""
    for name, parameter in split.named_parameters():
        expected = factor * unsplit.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, msg=name)


def _check_tied(rank: int) -> None:
    _, model, _ = _split(rank, 2, tied=True)
    assert tied_names(model) == [["embed.weight", "head.weight"]]
    model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None]).sum().backward()
    assert model.head.weight.grad is model.embed.weight.grad is not None


def test_styles_split_weights_and_activations_as_defined() -> None:
    run_ranks(2, _check)


def _check_operand_types(rank: int, has_bias: bool) -> None:
    """Check matrix products and collectives in a step of two split linear layers."""
    config = tiny_config(parallelism={"tensor_parallel_degree": 2})
    mesh = build(config, World(rank, 2, rank, torch.device("cpu")))
    torch.manual_seed(0)
    unsplit = torch.nn.Sequential(
        torch.nn.Linear(8, 12, has_bias), torch.nn.Tanh(), torch.nn.Linear(12, 8, has_bias)
    )
    split = copy.deepcopy(unsplit)
    model = torch.nn.ModuleDict({"layer": split})
    model.forward = lambda x_BtD, positions_BT: split(x_BtD)
    styles = {"layer.0": "colwise", "layer.2": "rowwise"}
    layout = Layout(first=(), layers="", last=(), tensor=styles, context="", expert="")
    tensor_parallel.apply(model, layout, mesh, config)
    x_BTD = torch.randn(3, 6, 8)
    own_BtD = x_BTD.chunk(2, 1)[rank].clone().requires_grad_()
    operand_types: list[type] = []

    class Look(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.linear:
                operand_types.extend(type(operand) for operand in args[:2])
            return function(*args, **(kwargs or {}))

    with Look(), CommDebugMode() as collectives:
        out_BtD = model(own_BtD, torch.arange(6).expand(3, -1))
        out_BtD.square().sum().backward()

    # plain tensors, not DTensors
    assert len(operand_types) == 4
    assert not any(issubclass(kind, DTensor) for kind in operand_types)
    # ranks of one machine exchange sequences through shared memory, with two barriers in each direction
    by_gloo = {} if shared_barrier.own_process().number else {"c10d.allreduce_": 4}
    counts = {str(operation): n for operation, n in collectives.get_comm_counts().items()}
    assert counts == by_gloo

    whole_BTD = x_BTD.clone().requires_grad_()
    expected_BTD = unsplit(whole_BTD)
    expected_BTD.square().sum().backward()
    torch.testing.assert_close(out_BtD, expected_BTD.chunk(2, 1)[rank])
    torch.testing.assert_close(own_BtD.grad, whole_BTD.grad.chunk(2, 1)[rank])
    _assert_equal_gradients(split, unsplit)


@pytest.mark.parametrize("has_bias", [False, True])
def test_split_linear_layers_multiply_plain_tensors_and_match_unsplit_ones(has_bias: bool) -> None:
    run_ranks(2, _check_operand_types, has_bias)


class Uses(torch.nn.Module):
    """Use a gathered sequence in every way: in split layers, a replicated layer, and an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fourth = (
            torch.nn.Linear(8, 12, bias) for bias in (True, False, True)
        )
        self.third = torch.nn.Linear(12, 12)
        self.whole, self.out = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x_BTD):
        of_whole_BTF = self.third(self.whole(x_BTD).tanh())
        return self.out(
            self.one(x_BTD).tanh() * self.two(x_BTD) * of_whole_BTF * self.fourth(x_BTD.sin())
        )


class Chain(torch.nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.norm, self.block = (
            torch.nn.Embedding(vocab, 8),
            torch.nn.RMSNorm(8),
            Uses(),
        )
        self.head = torch.nn.Linear(8, vocab)
        self.recomputes = False

    def forward(self, tokens_BT, positions_BT):
        x_BTD = self.embed(tokens_BT)
        block = (
            partial(checkpoint, self.block, use_reentrant=False) if self.recomputes else self.block
        )
        return self.head(x_BTD + block(self.norm(x_BTD)))


def _note_gradient_of_input(
    gradients: list[torch.Tensor], _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> None:
    inputs[0].register_hook(gradients.append)


def _check_chain(rank: int, ranks: int, shared: bool) -> None:
    """Check outputs and gradients of a model whose activations are plain tensors where possible."""
    if not shared:
        mapped_memory.FOLDER = Path("/nowhere")
    config = tiny_config(parallelism={"tensor_parallel_degree": ranks})
    mesh = build(config, World(rank, ranks, rank, torch.device("cpu")))
    styles = {
        "embed": "embed", "norm": "sequence", "block": "gather", "block.one": "colwise", "block.two": "colwise",
        "block.third": "colwise", "block.fourth": "colwise", "block.whole": "replicate", "block.out": "rowwise",
        "head": "head",
    }  # fmt: skip
    layout = Layout(first=(), layers="", last=(), tensor=styles, context="", expert="")
    for vocab in (12, 11):  # 11 is not divisible by 2 or 3 ranks
        torch.manual_seed(vocab)
        unsplit = Chain(vocab).double()
        split = copy.deepcopy(unsplit)
        tensor_parallel.apply(split, layout, mesh, config)
        tokens_BT = torch.randint(vocab, (3, 4 * ranks))
        positions_BT = torch.arange(4 * ranks).expand(3, -1)
        back_BTV = torch.randn(3, 4 * ranks, vocab, dtype=torch.float64)
        expected_BTV = unsplit(tokens_BT, positions_BT)
        out_BTV = split(tokens_BT, positions_BT)
        rows = -(-vocab // ranks)
        columns = slice(rows * rank, rows * rank + rows)
        torch.testing.assert_close(out_BTV, expected_BTV[..., columns])

        expected_BTV.backward(back_BTV)
        out_BTV.backward(back_BTV[..., columns])
        _assert_equal_gradients(split, unsplit)

        # a second backward through the graph adds the same gradients again, also with a recomputed block
        split.recomputes = True
        recomputed_BTV = split(tokens_BT, positions_BT)
        recomputed_BTV.backward(back_BTV[..., columns], retain_graph=True)
        recomputed_BTV.backward(back_BTV[..., columns])
        _assert_equal_gradients(split, unsplit, factor=3)

        # a hook on the gathered sequence sees its full gradient
        split.recomputes = False
        gradients: list[torch.Tensor] = []
        for model in (unsplit, split):
            note = partial(_note_gradient_of_input, gradients)
            model.block.register_forward_pre_hook(note)
        unsplit(tokens_BT, positions_BT).backward(back_BTV)
        split(tokens_BT, positions_BT).backward(back_BTV[..., columns])
        torch.testing.assert_close(gradients[1].full_tensor(), gradients[0])

        # after forward, the embedding's weight is the parameter again
        assert split.embed.weight is split.embed._parameters["weight"]


@pytest.mark.parametrize(("ranks", "shared"), [(2, True), (3, True), (2, False)])
def test_split_layers_have_the_gradients_of_unsplit_ones_for_any_use_of_a_gathered_sequence(
    ranks: int, shared: bool
) -> None:
    run_ranks(ranks, _check_chain, ranks, shared)


class Mixer(torch.nn.Module):
    """Every rank computes softmax and cumsum on all features. Only the last linear layer is split."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x_BTD):
        return self.out(self.into(x_BTD).softmax(-1).cumsum(1))


def _check_rowwise_on_full_features(rank: int) -> None:
    config = tiny_config(parallelism={"tensor_parallel_degree": 2})
    mesh = build(config, World(rank, 2, rank, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(3, 4, 8, generator=generator)
    back_BTD = torch.randn(3, 4, 8, generator=generator)
    torch.manual_seed(0)
    unsplit = Mixer()
    split = Mixer()
    split.load_state_dict(unsplit.state_dict())

    # Split the module: each rank has half of the sequence.
    length = SequenceLength(2)
    length.set_from_positions(split, (x_BTD, torch.zeros(3, 4)), {})
    style_names = {"": "gather", "into": "replicate", "out": "rowwise"}
    splitting = Splitting(2, False, length, Sequences())
    styles = {}
    for path, style_name in style_names.items():
        styles[path] = style_for(path, split.get_submodule(path), style_name, splitting)
    parallelize_module(split, mesh.submesh("tp"), styles)
    half = slice(2 * rank, 2 * rank + 2)
    own_BTD = x_BTD[:, half].clone().requires_grad_()
    full_BTD = x_BTD.clone().requires_grad_()

    expected_BTD = unsplit(full_BTD)
    out_BTD = local_tensor(split(own_BTD))
    torch.testing.assert_close(out_BTD, expected_BTD[:, half])

    expected_BTD.backward(back_BTD)
    out_BTD.backward(back_BTD[:, half])
    torch.testing.assert_close(own_BTD.grad, full_BTD.grad[:, half])
    _assert_equal_gradients(split, unsplit)
    # replicated weights have full gradients, which must not be summed
    torch.testing.assert_close(split.into.weight.grad.to_local(), unsplit.into.weight.grad)

    with pytest.raises(ConfigError, match='"rowwise" needs the full sequence.*write "router"'):
        split.out(torch.zeros(3, 2, 12))


def test_rowwise_linear_with_replicated_input_uses_the_features_of_its_rank() -> None:
    run_ranks(2, _check_rowwise_on_full_features)


def test_one_rank_changes_nothing() -> None:
    def check(rank: int) -> None:
        _, model, _ = _split(rank, 1)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not any(module._forward_pre_hooks for module in model.modules())

    run_ranks(1, check)


def test_styles_of_dense_models_exist_and_an_unknown_one_is_rejected() -> None:
    splitting = Splitting(2, True, SequenceLength(2), Sequences())
    for name in ("embed", "sequence", "gather", "colwise", "rowwise", "head"):
        assert style_for("", torch.nn.Linear(2, 2), name, splitting) is not None
    with pytest.raises(ValueError, match="unknown layout style 'diagonal'"):
        style_for("", torch.nn.Linear(2, 2), "diagonal", splitting)


@pytest.mark.parametrize(
    "slopes", [(0.5, 0.25, 0.125, 0.0625), torch.tensor([0.5, 0.25, 0.125, 0.0625]), None]
)
def test_only_attention_cores_drop_the_slopes_of_other_ranks_heads(slopes: Any) -> None:
    """Slopes outside of attention cores are unchanged, for example those a model passes to its core."""

    class SecondOfTwo:
        def size(self, axis: str) -> int:
            return 2

        def rank(self, axis: str) -> int:
            return 1

    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"core": torch.nn.Identity()})})
    model["attn"].alibi_slopes = slopes
    model["attn"]["core"].alibi_slopes = (0.5, 0.25, 0.125, 0.0625)
    layout = Layout(first=(), layers="layers", last=(), context="attn.core")

    tensor_parallel._split_alibi_slopes(model, layout, SecondOfTwo())  # type: ignore[arg-type]

    assert model["attn"]["core"].alibi_slopes == (0.125, 0.0625)
    assert model["attn"].alibi_slopes is slopes
