"""Every model family of the package: exact sizes, and the four requirements of a layout."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SHAPE
from torch import Tensor, nn

import shardtrain.models
from shardtrain.config.model_file import model_names
from shardtrain.layout import check
from shardtrain.models import build, find, shape_of
from shardtrain.models.layers import HeadNumbers
from shardtrain.ops import init_weights

FOLDER = Path(shardtrain.models.__file__).parent
# The module "transformers" gets its sizes from a Hugging Face folder.
FAMILIES = [name for name in model_names() if name != "transformers"]
CAUSAL = [name for name in FAMILIES if getattr(find(name), "CAUSAL", True)]

# Published: Llama 2 (7B, 13B, 70B), Llama 3.1 (8B, 70B, 405B) and Llama 3.2 (1B, 3B).
# Counted in the published weights: TinyLlama, Mistral, Qwen2.5, Pythia and NeoX.
# All others are computed: V D (2 V D unless tied) + L (2 D N H + 2 D K H + 3 D F + 2 D) + D,
# plus L (N H + 2 K H) with biases.
PARAMETER_COUNTS = {
    ("llama2", "debugmodel"): 23_204_096,
    ("llama2", "271M"): 271_090_688,
    ("llama2", "1B"): 1_055_991_808,
    ("llama2", "TinyLlama-1.1B"): 1_100_048_384,
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "26B"): 25_704_043_520,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "2.6M"): 2_557_632,
    ("llama3", "debugmodel"): 6_163_712,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("mistral", "debugmodel"): 5_573_888,
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B-v0.2"): 7_241_732_096,
    ("mistral", "7B-v0.3"): 7_248_023_552,
    ("mistral", "Nemo-12B"): 12_247_782_400,
    ("qwen2", "debugmodel"): 5_051_904,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("neox", "debugmodel"): 5_787_648,
    ("neox", "pythia-14m"): 14_067_712,
    ("neox", "pythia-31m"): 30_494_720,
    ("neox", "pythia-70m"): 70_426_624,
    ("neox", "pythia-160m"): 162_322_944,
    ("neox", "pythia-410m"): 405_334_016,
    ("neox", "pythia-1b"): 1_011_781_632,
    ("neox", "pythia-1.4b"): 1_414_647_808,
    ("neox", "pythia-2.8b"): 2_775_208_960,
    ("neox", "pythia-6.9b"): 6_857_302_016,
    ("neox", "pythia-12b"): 11_846_072_320,
    ("neox", "20B"): 20_554_567_680,
}


@pytest.fixture(autouse=True)
def without_gradients():
    """Disable gradients, with which experts would add balance losses as in training."""
    with torch.no_grad():
        yield


def small_shape(family: str, **overrides) -> tuple[Any, Any]:
    """Return the module of a family and a small Config."""
    module = find(family)
    known = {field.name for field in dataclasses.fields(module.Config)}
    sizes = {
        name: size
        for name, size in {**SHAPE, "tied_embeddings": False, **overrides}.items()
        if name in known
    }
    return module, shape_of(module, next(iter(module.FLAVORS)), sizes, "rmsnorm")


def tiny(family: str, **overrides) -> tuple[Any, nn.Module]:
    """Return the module of a family and a small model with weights on the CPU."""
    module, shape = small_shape(family, **overrides)
    names = [name for name, _ in build(module, shape).named_parameters()]
    draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, shape.num_layers)
    model = module.Model(shape)
    for name, parameter in model.named_parameters():
        init_weights.draw_(parameter, name, draws[name], 0)
    return module, model.eval()


def inputs(tokens: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, SHAPE["vocab_size"], (2, tokens), generator=generator), torch.arange(
        tokens
    ).expand(2, -1)


def test_every_flavor_of_dense_families_has_a_known_size() -> None:
    flavors = set()
    for family in ("llama2", "llama3", "mistral", "qwen2", "neox"):
        flavors |= {(family, flavor) for flavor in find(family).FLAVORS}
    assert flavors == set(PARAMETER_COUNTS)


@pytest.mark.parametrize(("family", "flavor"), PARAMETER_COUNTS)
def test_every_flavor_has_its_parameter_count_and_a_valid_layout(family: str, flavor: str) -> None:
    module = find(family)
    shape = shape_of(module, flavor, {}, "rmsnorm")
    model = build(module, shape)  # on the meta device: 405B costs no memory

    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == PARAMETER_COUNTS[family, flavor]
    )
    assert all(parameter.is_meta for parameter in model.parameters())

    names = [name for name, _ in model.named_parameters()]
    assert check(module.LAYOUT, [name for name, _ in model.named_modules()], names) == []
    assert init_weights.plan(
        names, module.initial(shape), module.LAYOUT, shape.num_layers
    ).keys() == set(names)


@pytest.mark.parametrize("family", ["llama2", "llama3"])
@pytest.mark.parametrize("norm_type", ["rmsnorm", "fused_rmsnorm", "layernorm", "np_layernorm"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_norm_builds_with_and_without_tied_embeddings(
    family: str, norm_type: str, tied: bool
) -> None:
    module = find(family)
    model = build(module, shape_of(module, "debugmodel", {"tied_embeddings": tied}, norm_type))
    names = {name for name, _ in model.named_parameters()}
    assert ("head.weight" in names) is not tied
    assert ("norm.weight" in names) is (norm_type != "np_layernorm")


@pytest.mark.parametrize("depth_init", [False, True])
def test_initial_residual_projections_decrease_with_depth(depth_init: bool) -> None:
    module = find("llama3")
    shape = shape_of(module, "debugmodel", {"depth_init": depth_init}, "rmsnorm")
    names = [name for name, _ in build(module, shape).named_parameters()]
    draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, 6)
    for leaf in ("attn.wo", "ffn.w2", "ffn.w3"):
        stds = [draws[f"layers.{i}.{leaf}.weight"].std for i in range(6)]
        assert stds == pytest.approx(
            [0.02 / (2 * (i + 1 if depth_init else 6)) ** 0.5 for i in range(6)]
        )

    assert draws["layers.3.attn.wq.weight"].std == 0.02
    assert draws["head.weight"].std == 256**-0.5
    assert draws["head.weight"].cutoff == 3.0
    assert (
        draws["norm.weight"].distribution
        == draws["layers.0.attn_norm.weight"].distribution
        == "ones"
    )


@pytest.mark.parametrize("family", CAUSAL)
def test_models_are_causal(family: str) -> None:
    _, model = tiny(family)
    tokens, positions = inputs()
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % SHAPE["vocab_size"]
    before = model(tokens, positions)
    after = model(changed, positions)

    # not bitwise: rounding of an expert's matmul may depend on its number of tokens
    torch.testing.assert_close(after[:, :8], before[:, :8], atol=1e-6, rtol=1e-5)
    # the outputs of the changed token and of all later tokens differ
    largest_changes = (before[:, 8:] - after[:, 8:]).abs().amax(dim=(0, 2))
    assert largest_changes.min() > 1e-4


def test_encoder_attends_in_both_directions_only_within_a_document() -> None:
    _, model = tiny("encoder")
    tokens, positions = inputs()
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % SHAPE["vocab_size"]

    # A changed token changes the outputs of all tokens of its document.
    changes = (model(tokens, positions) - model(changed, positions)).abs()
    assert changes.amax(dim=(0, 2)).min() > 1e-6

    # With two documents, the first one does not depend on the second, up to float32 rounding.
    documents = (positions >= 8).long()
    before = model(tokens, positions, documents)
    after = model(changed, positions, documents)
    first_document = model(tokens[:, :8], positions[:, :8])
    assert torch.equal(before[:, :8], after[:, :8])
    torch.testing.assert_close(before[:, :8], first_document, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_distances_between_positions_matter(family: str) -> None:
    module, model = tiny(family)
    with torch.no_grad():
        for name, parameter in model.get_submodule(module.LAYOUT.layers).named_parameters():
            parameter.mul_(10)  # sharpens attention, so positions have a clear effect
            if name.endswith(("q_norm.weight", "k_norm.weight")) and not parameter.any():
                parameter.fill_(9.0)  # zero-centered norms multiply by 1 + weight
    tokens, positions = inputs()
    logits = model(tokens, positions)

    torch.testing.assert_close(model(tokens, positions + 37), logits, atol=1e-3, rtol=0)
    assert (model(tokens, positions * 2) - logits).abs().max() > 0.1 * logits.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_apply_per_row(family: str) -> None:
    """Positions are an argument. Restarting them in one row, as a second document does, changes only this row."""
    _, model = tiny(family)
    tokens, positions = inputs()
    changed = positions.clone()
    changed[1] = torch.arange(12) % 6

    torch.testing.assert_close(
        model(tokens, changed)[0], model(tokens, positions)[0], atol=1e-6, rtol=1e-5
    )
    assert not torch.equal(model(tokens, positions)[1], model(tokens, changed)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_in_a_dictionary_with_string_keys(family: str) -> None:
    module, model = tiny(family)
    layers = model.get_submodule(module.LAYOUT.layers)
    assert isinstance(layers, nn.ModuleDict)
    assert list(layers) == [str(i) for i in range(SHAPE["num_layers"])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_forward_is_a_chain_that_can_be_split_between_layers(family: str, cut: int) -> None:
    """Pipeline stages replace modules of other stages by Identity, and delete layers of other stages."""
    module, full_model = tiny(family)
    _, front = tiny(family)
    _, back = tiny(family)
    layout = module.LAYOUT
    for name in layout.last:
        setattr(front, name, nn.Identity())
    for name in layout.first:
        setattr(back, name, nn.Identity())
    for i in range(SHAPE["num_layers"]):
        other_stage = front if i >= cut else back
        del other_stage.get_submodule(layout.layers)[str(i)]

    tokens, positions = inputs()
    hidden = front(tokens, positions)

    assert hidden.shape == (2, 12, SHAPE["dim"])
    assert torch.equal(back(hidden, positions), full_model(tokens, positions))

    # parameters of a stage keep the names of the full model
    names_of_front = {name for name, _ in front.named_parameters()}
    names_of_back = {name for name, _ in back.named_parameters()}
    assert names_of_front | names_of_back == {name for name, _ in full_model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_head_counts_follow_from_weight_shapes(family: str) -> None:
    """A model with half of the heads in its projections runs, and its outputs have the full shape."""
    module, model = tiny(family)
    for path, submodule in model.named_modules():
        if not isinstance(submodule, nn.Linear | HeadNumbers):
            continue
        style = ""
        for pattern, style_of_pattern in module.LAYOUT.tensor.items():
            if shardtrain.layout.matches(path, pattern):
                style = style_of_pattern
                break
        if style in ("colwise", "rowwise", "per_head"):
            dim = 1 if style == "rowwise" else 0
            submodule.weight = nn.Parameter(submodule.weight.chunk(2, dim)[0])
            if style == "colwise" and submodule.bias is not None:
                submodule.bias = nn.Parameter(submodule.bias.chunk(2)[0])

    assert model(*inputs()).shape == (2, 12, SHAPE["vocab_size"])


@pytest.mark.parametrize("family", CAUSAL)
def test_each_layer_has_a_core_without_parameters_or_buffers(family: str) -> None:
    module, model = tiny(family)
    globs = [glob for glob in (module.LAYOUT.context, module.LAYOUT.recurrence) if glob]
    cores = []
    for path, submodule in model.named_modules():
        if any(shardtrain.layout.matches(path, glob) for glob in globs):
            cores.append(submodule)

    assert len(cores) == SHAPE["num_layers"]
    for core in cores:
        assert not list(core.parameters())
        assert not list(core.buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_models_accept_any_token_count_and_batch_size(family: str) -> None:
    _, model = tiny(family)
    for batch, tokens in ((1, 1), (3, 5)):
        positions = torch.arange(tokens).expand(batch, -1)
        assert model(torch.zeros(batch, tokens, dtype=torch.int64), positions).shape[:2] == (
            batch,
            tokens,
        )


@pytest.mark.parametrize(
    ("family", "flavor", "theta", "scaling", "factor"),
    [
        ("llama2", "7B", 1e4, "none", None),
        ("llama3", "1B", 5e5, "llama3", 32.0),
        ("llama3", "8B", 5e5, "llama3", 8.0),
        ("llama3", "405B", 5e5, "llama3", 8.0),
    ],
)
def test_flavors_have_their_rotary_angles(
    family: str, flavor: str, theta: float, scaling: str, factor
) -> None:
    module = find(family)
    rope = build(module, shape_of(module, flavor, {}, "rmsnorm")).rope
    assert (rope.theta, rope.scaling, rope.head_dim) == (
        theta,
        scaling,
        module.FLAVORS[flavor]["head_dim"],
    )
    if factor is not None:
        assert rope.factor == factor
        assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_seq_len) == (
            1.0,
            4.0,
            8192,
        )


def test_rotary_options_reach_the_model() -> None:
    module = find("llama3")
    numbers = {
        "factor": 3.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_seq_len": 100,
    }
    overrides = {
        f"rope_{'scaling_' if key == 'factor' else ''}{key}": value
        for key, value in numbers.items()
    }
    shape = shape_of(
        module, "debugmodel", {**overrides, "rope_scaling": "linear", "rope_theta": 7.0}, "rmsnorm"
    )
    rope = build(module, shape).rope

    assert {key: getattr(rope, key) for key in numbers} == numbers
    assert (rope.scaling, rope.theta) == ("linear", 7.0)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_model_files_know_no_parallelism_configuration_or_environment(path: Path) -> None:
    """A model file must be readable and usable without the rest of the package."""
    imports = set()
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)

    refused = (
        "torch.distributed",
        "shardtrain.config",
        "shardtrain.distributed",
        "shardtrain.train",
        "os",
    )
    for imported in imports:
        for package in refused:
            assert imported != package
            assert not imported.startswith(f"{package}.")
    assert not names & {"environ", "getenv", "distributed"}
